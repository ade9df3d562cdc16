from __future__ import annotations

from dataclasses import dataclass

from slime_rl.config.checks import check_file, check_positive


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Agents: multi-turn generation with tools, --generate-function-path agent_loop."""

    tools: tuple[str, ...] = ()
    """Tools of every prompt that names none in metadata["tools"]: calculator, python, names of --tool-config."""

    tool_config: str | None = None
    """YAML file with tools of your own; docs/agents.md shows one."""

    max_turns: int = 8
    """Most turns of the policy in one episode; an episode that would need more is truncated."""

    tool_timeout_s: float = 10.0
    """Longest time for one tool call, unless --tool-config gives a tool its own; then the policy reads an error."""

    max_tool_response_len: int = 512
    """Most tokens of one tool's answer; the middle of a longer one is left out."""

    environment_path: str | None = None
    """The world of --generate-function-path environment_loop, as package.module:Class."""

    agent_path: str | None = None
    """An agent that talks to the gateway, as package.module:run, for --generate-function-path gateway."""

    tool_call_parser: str = "qwen25"
    """Format of tool calls, by the names of SGLang's parsers: qwen25, llama3, deepseekv3, glm45, pythonic, …"""

    reasoning_parser: str | None = None
    """Format of reasoning, by the names of SGLang's reasoning parsers: qwen3, deepseek-r1, …; none when not given."""

    def __post_init__(self) -> None:
        check_positive(
            max_turns=self.max_turns,
            tool_timeout_s=self.tool_timeout_s,
            max_tool_response_len=self.max_tool_response_len,
        )
        if self.tool_config is not None:
            check_file("--tool-config", self.tool_config)
