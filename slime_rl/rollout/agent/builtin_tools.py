"""Tools that come with the project. They run in fenced processes: what they raise becomes text for the policy."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from slime_rl.rollout.rewards.sandbox import run_program

PYTHON_SECONDS = 3.0  # of CPU time; by the clock it may take three times as long, within --tool-timeout-s
PYTHON_OUTPUT_BYTES = 64 * 1024
MAX_EXPRESSION_LENGTH = 500
MAX_BITS = 4096  # of a whole number on the way; 10 ** 10 ** 10 would fill the memory

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type, Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}


def calculator(expression: str) -> str:
    """The value of an arithmetic expression with + - * / // % ** and brackets, exact for whole numbers."""
    if len(expression) > MAX_EXPRESSION_LENGTH:
        raise ValueError(f"an expression may have {MAX_EXPRESSION_LENGTH} characters, got {len(expression)}")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    if isinstance(value, Fraction):
        return str(value.numerator) if value.denominator == 1 else repr(float(value))
    return repr(value)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(node.value) if isinstance(node.value, int) else node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            _check_power(left, right)
        return _BINARY[type(node.op)](left, right)
    raise ValueError(f"not arithmetic: {ast.unparse(node)}")


def _check_power(base: Any, exponent: Any) -> None:
    size = max(abs(base.numerator), base.denominator).bit_length() if isinstance(base, Fraction) else 64
    if size * abs(exponent) > MAX_BITS:
        raise ValueError(f"the power {base} ** {exponent} is too large")


def python(code: str) -> str:
    """What a Python program prints, and its last line where that is an expression. No network, nothing is kept."""
    run = run_program(with_printed_end(code), "", PYTHON_SECONDS, output_bytes=PYTHON_OUTPUT_BYTES)
    if run["problem"]:
        why = {"time": f"it used more than {PYTHON_SECONDS:g} s", "memory": "it ran out of memory"}
        return f"{run['output']}\nError: {why.get(run['problem'], 'it printed too much')}".strip()
    last_error = "" if run["status"] == 0 else run["errors"].strip()
    return "\n".join(part for part in (run["output"].rstrip("\n"), last_error) if part)


def with_printed_end(code: str) -> str:
    """`code` with its last statement printed where that is an expression; unchanged if it has errors."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return code  # the interpreter explains it to the policy
    if not tree.body or not isinstance(tree.body[-1], ast.Expr):
        return code
    last = ast.unparse(tree.body[-1].value)
    before = ast.unparse(ast.Module(body=tree.body[:-1], type_ignores=[]))
    return f"{before}\n_last = {last}\nif _last is not None:\n    print(_last)\n"
