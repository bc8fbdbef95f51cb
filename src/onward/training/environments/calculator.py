"""A calculator."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from onward.training.environments.environment import Talk
from onward.training.rewards.reward import Completion

OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
MOST_CHARS = 200  # maximum length of an expression
MOST = 1e15  # maximum absolute value of a result


@dataclass(frozen=True)
class Calculator(Talk, kind="calculator"):
    """Replies to a turn with the value of the last expression in it, such as calc(2 + 3): `begin` and `end` enclose the
    expression, `before` and `after` enclose the value. A turn without an expression ends the completion."""

    begin: str = "calc("  # text before an expression
    end: str = ")"  # text after the expression
    before: str = "= "  # text before the result
    after: str = "\n"  # text after the result

    def reply(self, completion: Completion) -> str | None:
        expressions = re.findall(rf"{re.escape(self.begin)}(.*?){re.escape(self.end)}", completion.turns[-1], re.DOTALL)
        return f"{self.before}{calculated(expressions[-1])}{self.after}" if expressions else None


def calculated(expression: str) -> str:
    """Return the value of an expression of numbers, + - * / // % and parentheses as text; "error" for any other text,
    for more than 200 characters, and for operations without a result or with one beyond 1e15. Runs no code."""

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(int() | float() as number) if not isinstance(number, bool):
                return number
            case ast.BinOp(left, op, right) if type(op) in OPERATORS:
                result: float = OPERATORS[type(op)](value(left), value(right))
            case ast.UnaryOp(op, operand) if type(op) in OPERATORS:
                result = OPERATORS[type(op)](value(operand))
            case _:
                raise ValueError
        if not -MOST <= result <= MOST:
            raise ValueError
        return result

    try:
        if len(expression) > MOST_CHARS:
            raise ValueError
        result = value(ast.parse(expression.strip(), mode="eval").body)
    except (ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError):
        return "error"
    return f"{result:.10g}"
