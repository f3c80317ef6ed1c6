"""The databases that `tables.py` writes by JDBC, and what they call differently."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pyspark.sql import types as t

from dedup.errors import Problem, SettingsError


@dataclass(frozen=True, slots=True)
class Jdbc:
    """One table of one database."""

    url: str
    """`jdbc:postgresql://…` or `jdbc:sqlite:FILE`."""
    table: str
    user: str | None = None
    password: str | None = None

    @property
    def dialect(self) -> Dialect:
        """What this database calls things; raises SettingsError for one that is neither."""
        for dialect in (POSTGRESQL, SQLITE):
            if self.url.startswith(dialect.prefix):
                return dialect
        raise SettingsError([Problem("--jdbc", f"{self.url!r} is neither jdbc:postgresql: nor jdbc:sqlite:")])

    def properties(self) -> dict[str, str]:
        """Return the options of a connection."""
        given = {"user": self.user, "password": self.password}
        return {"driver": self.dialect.driver} | {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Dialect:
    """What two databases call differently."""

    prefix: str
    driver: str
    binary: str
    double: str
    binary_collation: str
    """By which text is compared as Spark compares it: by its bytes."""
    digits: int
    """That a decimal may have without losing any."""
    one_writer: bool

    def collated(self, kind: t.DataType) -> str:
        """Return what stands behind a column of this type where it decides an order."""
        return f" COLLATE {self.binary_collation}" if isinstance(kind, t.StringType) else ""

    def column(self, kind: t.DataType) -> str:
        """Return the SQL type of a Spark type; raises SettingsError for one that no column can hold."""
        match kind:
            case t.BinaryType():
                return self.binary
            case t.StringType():
                return "TEXT"
            case t.LongType():
                return "BIGINT"
            case t.IntegerType() | t.ShortType() | t.ByteType():
                return "INTEGER"
            case t.DoubleType() | t.FloatType():
                return self.double
            case t.BooleanType():
                return "BOOLEAN"
            case t.TimestampType():
                return "TIMESTAMP"
            case t.DateType():
                return "DATE"
            case t.DecimalType():
                return self._decimal(kind)
            case _:
                text = f"a column of type {kind.simpleString()} fits no table of a database; take its members apart"
                raise SettingsError([Problem("--schema", text)])

    def _decimal(self, kind: t.DecimalType) -> str:
        if kind.precision > self.digits:
            text = (
                f"a column of type {kind.simpleString()}: this database keeps {self.digits} digits; declare it STRING"
            )
            raise SettingsError([Problem("--schema", text)])
        return f"NUMERIC({kind.precision},{kind.scale})"


POSTGRESQL: Final = Dialect(
    "jdbc:postgresql:", "org.postgresql.Driver", "BYTEA", "DOUBLE PRECISION", '"C"', digits=1000, one_writer=False
)
SQLITE: Final = Dialect("jdbc:sqlite:", "org.sqlite.JDBC", "BLOB", "DOUBLE", "BINARY", digits=15, one_writer=True)
