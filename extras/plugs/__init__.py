"""Formats, tools and tasks that few runs need, by what a flag says to have them."""

PLUGS = {
    "--format hermes": "extras.plugs.hermes:Hermes",
    "--format hermes_tools": "extras.plugs.hermes:HermesTools",
    "--tools calculator": "extras.tasks.calculator:tools_of",
    "--tools mcp": "extras.plugs.mcp:tools_of",  # mcp:URL or mcp:COMMAND
    "--task openenv": "extras.plugs.openenv:task_of",  # openenv:URL
    "--reward": "extras.plugs.rewards:rewarded",
    "--task": "extras.plugs.environment:task_of",  # a class that does not extend Task
}
