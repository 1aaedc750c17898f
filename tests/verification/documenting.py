"""The table of rules in docs/verify.md, as the rules themselves tell it."""

from pathlib import Path

from gguf2st.verification import RULES

DOCUMENT = Path(__file__).parents[2] / "docs" / "verify.md"


def rules_table() -> str:
    lines = ["| rule | what has to hold | engines |", "|---|---|---|"]
    for name in sorted(RULES, key=lambda name: (name[0], int(name[2:]))):
        rule = RULES[name]
        what = rule.doc.partition(" Source:")[0]
        deep = " (`--deep`)" if rule.deep else " (`--against`)" if rule.against else ""
        lines.append(
            f"| {name} | {what.replace('|', chr(92) + '|')}{deep} | {', '.join(rule.engines)} |"
        )
    return "\n".join(lines)
