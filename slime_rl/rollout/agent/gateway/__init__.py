"""A gateway for agents that bring their own loop: OpenAI and Anthropic endpoints that record what they sample."""
