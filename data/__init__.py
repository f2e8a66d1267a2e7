"""One module a task: load the problems, write the prompts, score the completions."""
