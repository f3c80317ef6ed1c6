"""The first record of each ID is marked unique and the others duplicate, by DuckDB or Polars: Parquet to Parquet.

    python mark_first.py duckdb|polars ROWS.parquet OUT.parquet THREADS

Prints one line of JSON with the version, the query, and the count of each mark. It runs in a virtual environment that
`build_peers.tables_python` makes.
"""

from __future__ import annotations

import json
import os
import sys

DUCKDB = """
COPY (
  SELECT *, CASE row_number() OVER (PARTITION BY id ORDER BY "partition", "offset")
            WHEN 1 THEN 'unique' ELSE 'duplicate' END AS verdict
  FROM (SELECT *, json_extract_string(decode(value), '$.event_id') AS id FROM read_parquet('{rows}'))
) TO '{out}' (FORMAT parquet)
"""
POLARS = """
pl.scan_parquet(rows)
  .with_columns(id=pl.col("value").cast(pl.String).str.json_path_match("$.event_id"))
  .with_columns(verdict=pl.when(pl.int_range(pl.len()).over("id", order_by=["partition", "offset"]) == 0)
                          .then(pl.lit("unique")).otherwise(pl.lit("duplicate")))
  .sink_parquet(out, compression="snappy")
"""


def main(engine: str, rows: str, out: str, threads: str) -> None:
    """Run one engine."""
    os.environ["POLARS_MAX_THREADS"] = threads
    if engine == "duckdb":
        import duckdb  # noqa: PLC0415

        version, query = duckdb.__version__, DUCKDB.format(rows=rows, out=out)
        duckdb.execute(f"SET threads = {threads}")
        duckdb.execute(query)
        counts = dict(duckdb.execute(f"SELECT verdict, count(*) FROM '{out}' GROUP BY 1").fetchall())
    else:
        import polars as pl  # noqa: PLC0415

        version, query = pl.__version__, POLARS
        exec(f"({query.strip()})", {"pl": pl, "rows": rows, "out": out})
        counts = dict(pl.scan_parquet(out).group_by("verdict").len().collect().iter_rows())
    print(json.dumps({"version": version, "query": " ".join(query.split()), "counts": counts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
