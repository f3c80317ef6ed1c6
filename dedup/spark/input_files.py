"""Lists the files of an input at any directory depth, and finds the columns of Parquet files and of directory levels.

By default, Spark silently skips files in subdirectories that are not columns (`day=2026-01-31/`). If subdirectories are
columns, Spark silently skips files outside of these subdirectories.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal
from urllib.parse import unquote, urlsplit

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession

from dedup.errors import Problem, SettingsError
from dedup.spark.columns import RECORDS
from dedup.spark.reduce_side import JUDGED
from dedup.spark.session import without_access

LOSSLESS: Final = {"ignoreCorruptFiles": "false", "ignoreMissingFiles": "false"}
PATTERN_CHARACTERS: Final = "*?[{\\"
"""The characters that turn a path into a pattern for Hadoop (`GlobPattern`)."""
PATTERN: Final = re.compile(f"[{re.escape(PATTERN_CHARACTERS)}]")
_SPECIAL: Final = re.compile(r"[*?\[\]{}\\]")
_NO_COLUMNS_OF_PATH: Final = {*RECORDS.names, "timestamp", "run", *(field.name for field in JUDGED)}
_BZIP2: Final = b"BZh"
"""The first bytes of every file of bzip2."""
_HADOOP_BLOCK: Final = 0
"""The first byte of Hadoop's snappy and lz4 files, which begin with the length of a block, less than 16 MiB."""
Kind = Literal["Delta", "Iceberg"]
_TABLES: Final[Mapping[Kind, str]] = {
    "Delta": "is a Delta table, whose files also contain deleted and rewritten rows; read it with --format delta",
    "Iceberg": (
        "is an Iceberg table, whose files also contain deleted and rewritten rows; read it with --format table, by its "
        "name in a catalog"
    ),
}
_CHECKED_AT_ONCE: Final = 8
_NO_DIFFERENCE: Final = re.compile(r"(?:^|(?<=[{;] ))(?:required|optional) | = \d+(?=;| \{|$)")
"""Matches the parts of a Parquet schema that Spark and Arrow ignore: `required` or `optional`, and field IDs."""
_HIDDEN: Final = re.compile(r"(?:\.|_(?!.*=)).*|.*\._COPYING_")
"""The names of files that Spark skips (`HadoopFSUtils.shouldFilterOutPathName`)."""


def reader_options(spark: SparkSession, paths: Sequence[str], base: str | None = None) -> Mapping[str, str]:
    """Return the options with which Spark reads all files at or below ``paths``, and makes columns of directories that
    have names like ``day=2026-01-31``.

    Such directories can be below a path or at its end (``in/day=2026-01-31`` or ``in/day=*``). If ``base`` is given,
    ``paths`` are files below the directory ``base``. Raises SettingsError if files have different columns in their
    paths, if a path names a file that Spark skips, or if a path is a part of a Delta or Iceberg table, whose files also
    contain deleted rows.
    """
    refuse_hidden(spark, paths)
    look = _Look(spark)
    files = sorted({_decoded(file) for file in _all(spark, paths).inputFiles()})
    named = {look.qualified(base): look.qualified(base)} if base is not None else look.named(paths, frozenset(files))
    roots = frozenset(named.values())
    look.refuse_tables({*map(_parent, files), *named}, frozenset(named), files)
    layouts = {parent: _layout(parent, roots, upwards=base is None) for parent in map(_parent, files)}
    common = _common(files, layouts)
    if not common.columns:
        # With this option, Spark also reads a file that is in two paths only once, and does not parse names like
        # `day=`.
        return {"recursiveFileLookup": "true"}
    if base is not None:
        return {"basePath": base}
    # Spark rejects a base path below one of the paths, and does not need it there.
    # The slash turns a bucket's name (`s3a://archive`) into a path.
    return {} if any(common.base.startswith(f"{each}/") for each in named) else {"basePath": f"{common.base}/"}


def refuse_lost_columns(spark: SparkSession, paths: Sequence[str], files: Iterable[str], base: str | None) -> None:
    """Raise SettingsError if a backfill of ``paths`` would make a column of a directory in the path of one of
    ``files``, but a run that reads only columns below the directory ``base`` (None: no columns) would leave it out.
    """
    look = _Look(spark)
    roots = frozenset(look.named(paths, frozenset(filter(look.is_file, map(look.qualified, paths)))).values())
    below = frozenset() if base is None else frozenset({look.qualified(base)})
    for directory in sorted(map(look.qualified, {*map(_parent, files)})):
        found = _layout(directory, roots, upwards=True)
        lost = [name for name in found.columns if name not in _layout(directory, below, upwards=False).columns]
        if lost:
            text = (
                f"{directory} has the column `{lost[0]}` in its path. Only directories below a single --input become "
                f"columns of an incremental run; give a directory above the columns as the only --input: {found.base}"
            )
            raise SettingsError([Problem("--input", text)])


def refuse_hidden(spark: SparkSession, paths: Iterable[str]) -> None:
    """Raise SettingsError if a path names a file that Spark silently skips, even if it is the only path."""
    hidden = [path for path in paths if _HIDDEN.fullmatch(_name(path)) and not PATTERN.search(path)]
    text = "is a file that Spark skips, because its name begins with `_` or `.`, or ends with `._COPYING_`; rename it"
    problems = [Problem(path, text) for path in hidden if _Look(spark).is_file(path)]
    if problems:
        raise SettingsError(problems)


def refuse_unread_codecs(spark: SparkSession, files: Sequence[str]) -> None:
    """Raise SettingsError if Hadoop could find no line in one of the text ``files`` (URIs) without an error.

    The content of such a file does not begin as its name says: ``.bz2``, or Hadoop's form of ``.snappy`` or ``.lz4``.
    """
    look = _Look(spark)
    suspects = [file for file in files if file.lower().endswith((".bz2", ".snappy", ".lz4"))]
    with ThreadPoolExecutor(_CHECKED_AT_ONCE) as pool:
        begins = pool.map(look.begin_of, suspects)
        found = [(file, begin) for file, begin in zip(suspects, begins, strict=True) if begin]
    problems = [
        Problem(file, "is named .bz2, but is not bzip2. Nothing was judged. Correct its name, or repair or remove it")
        if file.lower().endswith(".bz2")
        else Problem(file, "is not in Hadoop's form of its compression. Nothing was judged. Compress it as .gz or .bz2")
        for file, begin in found
        if begin != _BZIP2 and (file.lower().endswith(".bz2") or begin[0] != _HADOOP_BLOCK)
    ]
    if problems:
        raise SettingsError(problems)


def refuse_lossy(spark: SparkSession) -> None:
    """Raise SettingsError if the session skips files of tables; unlike a path's files, tables take no `LOSSLESS`."""
    names = (f"spark.sql.files.{name}" for name in LOSSLESS)
    text = "is true, so Spark would leave out rows of the table; set it to false in the session"
    problems = [Problem(name, text) for name in names if str(spark.conf.get(name)).strip().lower() == "true"]
    if problems:
        raise SettingsError(problems)


def literal(path: str) -> str:
    """Return the path as a pattern that matches only this path."""
    return _SPECIAL.sub(r"\\\g<0>", path)


def _all(spark: SparkSession, paths: Sequence[str]) -> DataFrame:
    return spark.read.format("binaryFile").option("recursiveFileLookup", "true").load(list(paths))


@dataclass(frozen=True, slots=True)
class _Layout:
    """The columns that Spark makes of a file's directories, and the directory that contains these directories."""

    base: str
    columns: tuple[str, ...]

    def __str__(self) -> str:
        names = ", ".join(f"`{name}`" for name in self.columns)
        return f"has the columns {names} in its path below {self.base}" if names else "has no columns in its path"


def _common(files: Sequence[str], layouts: Mapping[str, _Layout]) -> _Layout:
    first = _Layout("", ())
    for at, file in enumerate(files):
        here = layouts[_parent(file)]
        if at and here != first:
            text = f"{here}, but {files[0]} {first}. Read them separately, or move them to directories alike"
            raise SettingsError([Problem(file, text)])
        first = here
    return first


def _layout(directory: str, roots: Collection[str], *, upwards: bool) -> _Layout:
    """Return the columns that Spark finds in the path of a directory (`PartitioningUtils.parsePartition`): the last
    unbroken sequence of ``name=value`` below the root that contains the directory.

    If ``upwards`` is true, the sequence may begin above the root.
    """
    root = directory
    while root not in roots:
        if not root:
            return _Layout("", ())
        root = _parent(root)
    below = directory[len(root) :].strip("/").split("/")
    while below and not _column(below[-1]):
        below.pop()
    names: list[str] = []
    while below and (column := _column(below[-1])):
        names.insert(0, column)
        below.pop()
    base = "/".join([root, *below])
    above: list[str] = []
    while upwards and (column := _column(_name(base))):
        above.insert(0, column)
        base = _parent(base)
    # If a directory in the user's path is named after a column of a record or of a verdict, the path only selects
    # files, so the directories in the path are not columns of the input.
    if not _NO_COLUMNS_OF_PATH.isdisjoint(above):
        base, above = root, []
    columns = (*above, *names)
    return _Layout(base if columns else "", columns)


def columns_of_files(spark: SparkSession, files: Sequence[str]) -> Collection[str]:
    """Return the columns of the Parquet files. Raises SettingsError if a file is damaged or the files have different
    columns.
    """
    # Spark would fill a column that a file lacks with nulls, which would become tombstones or missing times.
    with ThreadPoolExecutor(_CHECKED_AT_ONCE) as pool:
        found = list(pool.map(partial(_footer, spark), files))
    problems = [each for each in found if isinstance(each, Problem)]
    wanted: Mapping[str, str] = next((each for each in found if not isinstance(each, Problem)), {})
    for file, columns in zip(files, found, strict=True):
        if isinstance(columns, Problem):
            continue
        for name in sorted({*wanted, *columns}):
            here, first = columns.get(name, "missing"), wanted.get(name, "missing")
            if here != first:
                text = f"column `{name}` is {here}, but {first} in the first file: read the files separately"
                problems.append(Problem(file, text))
    if problems:
        raise SettingsError(problems)
    return wanted


def _footer(spark: SparkSession, file: str) -> dict[str, str] | Problem:
    """Return the columns of a Parquet file with their types, or the reason why the file is damaged.

    Raises SettingsError if the file system denies access to the file.
    """
    jvm: Any = spark._jvm  # noqa: SLF001 - the only way to Hadoop's file systems
    conf = spark._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
    reader: Any = None
    try:
        path = jvm.org.apache.hadoop.fs.Path(jvm.java.net.URI(file))
        source = jvm.org.apache.parquet.hadoop.util.HadoopInputFile.fromPath(path, conf)
        reader = jvm.org.apache.parquet.hadoop.ParquetFileReader.open(source)
        schema = reader.getFileMetaData().getSchema()
        return {kind.getName(): _NO_DIFFERENCE.sub("", " ".join(str(kind).split())) for kind in schema.getFields()}
    except Py4JJavaError as error:
        refused = without_access(str(error))
        if refused is not None:
            raise refused from error
        reason = str(error.java_exception.getMessage()).splitlines()[0]
        return Problem(file, f"is damaged: {reason}. Repair or remove it")
    finally:
        if reader is not None:
            reader.close()


class _Look:
    """Inspects directories on any file system that Hadoop supports. All paths are decoded URIs."""

    def __init__(self, spark: SparkSession) -> None:
        jvm: Any = spark._jvm  # noqa: SLF001  # PySpark's only way to Hadoop's file systems
        self._path: Final = jvm.org.apache.hadoop.fs.Path
        self._uri: Final = jvm.java.net.URI
        self._conf: Final = spark._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001

    def qualified(self, path: str) -> str:
        """Return the absolute path, including the scheme of the file system."""
        made = self._path(path)
        return _text(made.getFileSystem(self._conf).makeQualified(made))

    def is_file(self, path: str) -> bool:
        """Return whether the path names an existing file."""
        at = self._path(path)
        return bool(at.getFileSystem(self._conf).isFile(at))

    def begin_of(self, file: str) -> bytes:
        """Return the first three bytes of a file, whose name is a URI, or fewer if the file is shorter."""
        path = self._path(self._uri(file))
        with closing(path.getFileSystem(self._conf).open(path)) as stream:
            found = [stream.read() for _ in _BZIP2]
        return bytes(each for each in found if each >= 0)

    def named(self, paths: Iterable[str], files: frozenset[str]) -> dict[str, str]:
        """Map each file or directory that ``paths`` name to the directory below which to look for columns.

        That directory is the named directory itself or, for a pattern, usually the directory that contains all possible
        matches. The result omits files that are named without a pattern.
        """
        found: dict[str, str] = {}
        for path in paths:
            pattern = PATTERN.search(path)
            if pattern is None:
                root = self.qualified(path)
                found |= {} if root in files else {root: root}
                continue
            begin = path.rfind("/", 0, pattern.start()) + 1
            root = self.qualified(path[:begin] or ".")
            selects = any(_column(name) in _NO_COLUMNS_OF_PATH for name in path[begin:].split("/"))
            at = self._path(path)
            for status in at.getFileSystem(self._conf).globStatus(at) or ():
                name = _text(status.getPath())
                found[name] = root if not selects else name if status.isDirectory() else _parent(name)
        return found

    def refuse_tables(self, directories: Iterable[str], named: frozenset[str], files: Iterable[str]) -> None:
        """Raise SettingsError if a directory is a Delta or Iceberg table, or a part of one."""
        looked: set[str] = set()
        for directory in directories:
            at = directory
            while _name(at) and at not in looked:
                looked.add(at)
                # Directories with such names are not parts of a table.
                at = "" if _name(at)[0] in "_." else _parent(at)
        # Skip directories like `day=...`, which may number in the thousands and are unlikely to be tables.
        worthy = [each for each in looked if each in named or not _column(_name(each))]
        with ThreadPoolExecutor(_CHECKED_AT_ONCE) as pool:
            kinds = dict(zip(worthy, pool.map(self._kind_of_table, worthy), strict=True))
        kinds |= {_parent(_parent(file)): "Iceberg" for file in files if _is_metadata(file)}
        problems = [Problem(each, _TABLES[kind]) for each, kind in sorted(kinds.items()) if kind is not None]
        if problems:
            raise SettingsError(problems)

    def _kind_of_table(self, directory: str) -> Kind | None:
        path, metadata = self._path(directory), self._path(f"{directory}/metadata")
        try:
            system = path.getFileSystem(self._conf)
            if system.exists(self._path(f"{directory}/_delta_log")):
                return "Delta"
            found = system.listStatus(metadata) if system.exists(metadata) else ()
            return "Iceberg" if any(_is_metadata(_text(each.getPath())) for each in found) else None
        except Py4JJavaError:
            # The user may have permission to read an input, but not to list the directories above the input.
            return None


def _is_metadata(file: str) -> bool:
    return file.endswith(".metadata.json") and _name(_parent(file)) == "metadata"


def _text(path: Any) -> str:  # noqa: ANN401 - a Hadoop path
    uri = path.toUri()
    return f"{uri.getScheme()}://{uri.getAuthority() or ''}{uri.getPath()}"


def _decoded(file: str) -> str:
    uri = urlsplit(file)
    return f"{uri.scheme}://{uri.netloc}{unquote(uri.path)}"


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _column(name: str) -> str:
    """Return the name of the column in a directory's name, or an empty string if the directory is not a column."""
    column, _, value = name.partition("=")
    return column if value else ""
