"""What is asked, called and scored. `--task module:Class` names a task, a subclass of `Task` in a file
of its own; search_qa.py, the default, is one.

Nothing else knows what the policy is trained for: rollouts, rewards, failures and metrics all come
from here.
"""

from tasks.task import Message, Task
from tasks.trajectories import Job, Question, Trajectory, Turn

__all__ = ["Job", "Message", "Question", "Task", "Trajectory", "Turn"]
