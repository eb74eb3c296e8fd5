"""What is asked, called and scored. `--task module:Class` names a task, a subclass of `Task` in a file
of its own; search_qa.py, the default, is one."""

from tasks.task import Job, Message, Question, Task, Trajectory, Turn

__all__ = ["Job", "Message", "Question", "Task", "Trajectory", "Turn"]
