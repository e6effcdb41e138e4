"""What all tables of tools/docs.py are made with."""
import json
import pathlib

TOP = pathlib.Path(__file__).resolve().parent.parent


def markdown(header, rows):
    """A table. What the first column would say again it leaves empty."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for above, row in zip([[None], *rows], rows):
        first = "" if row[0] == above[0] else row[0]
        lines.append("| " + " | ".join(str(cell) for cell in [first, *row[1:]]) + " |")
    return "\n".join(lines) + "\n"


def code(word):
    return f"`{word}`"


def records(topic):
    """What was recorded of every GPU about a topic: (machine and date, record)."""
    for path in sorted((TOP / "bench/results").glob(f"*-{topic}.json")):
        record = json.loads(path.read_text())
        yield f"{record['machine']}, {record['date'][:10]}", record
