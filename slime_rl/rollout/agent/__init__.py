"""Multi-turn rollouts: token-exact conversations, tools, environments, and a gateway for agents with their own loop."""

from slime_rl.rollout.agent.loop import agent_loop

__all__ = ["agent_loop"]
