"""A tool: any typed, documented function. The world's policy cannot write its tag and refuses it.

python inspo.py --model Qwen/Qwen2.5-0.5B-Instruct --tools search,extras.examples.count:count
"""


def count(text: str) -> int:
    """Counts the words of a text.

    Args:
        text: The words
    """
    return len(text.split())
