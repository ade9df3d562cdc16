from slime_rl.buffer.sources.file_source import FilePromptSource
from slime_rl.buffer.sources.prompts import LocatedPrompt, check_prompt_lengths
from slime_rl.buffer.sources.spec import DataFile, parse_data_spec
from slime_rl.buffer.sources.table import PromptTable, check_first_rows, read_prompts

__all__ = [
    "DataFile",
    "FilePromptSource",
    "LocatedPrompt",
    "PromptTable",
    "check_first_rows",
    "check_prompt_lengths",
    "parse_data_spec",
    "read_prompts",
]
