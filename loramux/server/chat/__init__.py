"""What a chat adds to a generation: structured answers, tools, reasoning."""
