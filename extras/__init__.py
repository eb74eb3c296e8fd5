"""Guests: what is not in the paper, a file each. They import the core; nothing outside this folder
imports them."""
