"""The notebook of docs/spark.md as a program: ``python notebook.py [REMOTE]``, run where its files are.

It prints what is unique and the counts of verdicts, as JSON. REMOTE is the address of a Spark Connect server.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "spark.md"
CUSTOMERS = {"A-1": "ann", "A-2": "bob", "A-3": "cy"}


def blocks(kind: str) -> list[str]:
    """Return the code blocks of a kind in the chapter about notebooks."""
    chapter = PAGE.read_text(encoding="utf-8").partition("## In a notebook")[2].partition("\n## ")[0]
    return re.findall(rf"^```{kind}\n(.*?)^```$", chapter, re.MULTILINE | re.DOTALL)


def write_files(directory: Path) -> None:
    """Write what the notebook reads: three orders, two of them twice, and one without a readable time."""
    import pyarrow as pa  # noqa: PLC0415  the program itself needs none of it
    import pyarrow.parquet as pq  # noqa: PLC0415

    (topology,) = blocks("yaml")
    (directory / "orders.yaml").write_text(topology, encoding="utf-8")
    ids = ["A-1", "A-2", "A-3", "A-1", "A-2", "A-3"]
    times = [f"2024-01-01T12:0{minute}:00Z" for minute in range(5)] + ["noon"]
    customers = [CUSTOMERS[each] for each in ids]
    (directory / "orders").mkdir()
    pq.write_table(
        pa.table({"order_id": ids, "placed_at": times, "customer": customers}), directory / "orders" / "1.parquet"
    )


def run(spark: Any) -> dict[str, Any]:
    """Run the notebook, and return what it found."""
    (code,) = blocks("python")
    names: dict[str, Any] = {"spark": spark}
    with contextlib.redirect_stdout(sys.stderr):
        exec(compile(code, "docs/spark.md", "exec"), names)
    counts = {
        row["dedup_verdict"]: row["count"] for row in names["verdicts"].groupBy("dedup_verdict").count().collect()
    }
    return {"unique": sorted(map(list, names["clean"].collect())), "counts": counts}


EXPECTED = {
    "unique": [[each, f"2024-01-01T12:0{minute}:00Z", CUSTOMERS[each]] for minute, each in enumerate(CUSTOMERS)],
    "counts": {"unique": 3, "duplicate": 2, "dead_letter": 1},
}


def main() -> None:
    """Run the notebook in the session that a user of this program would have."""
    from pyspark.sql import SparkSession  # noqa: PLC0415

    remote = sys.argv[1:]
    session = (SparkSession.builder.remote(remote[0]) if remote else SparkSession.builder).getOrCreate()
    sys.stdout.write(json.dumps(run(session)) + "\n")
    session.stop()


if __name__ == "__main__":
    main()
