"""What is to be filled into the blanks of the labs, with a sentence why, and a guess for each
prediction."""
