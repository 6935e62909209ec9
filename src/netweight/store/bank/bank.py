"""Banks: many adapters of the same modules in one folder, to be read by rows, grown, and checked.

`bank.json` lists the shards with their adapters; a shard holds the factors of some hundred adapters one under the other
(`shard`). `BankWriter` writes (`write`), `AdapterBank.ingest` fills a bank from a folder of adapters (`ingest`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

from netweight.core.files import digest_config, digest_file
from netweight.core.names import nearest_names
from netweight.core.progress import QUIET, Progress
from netweight.errors import CorruptBlob, NameNotFound, UsageError
from netweight.store.bank.shard import RECORD, BankRecord, ShardReader, ShardRecord, read_bank_record

if TYPE_CHECKING:
    from netweight.nn.lora import Adapter, AdapterStack


@final
class AdapterBank:
    """An open bank. Made by `AdapterBank.open` or `AdapterBank.ingest`.

    Adapters are numbered in the order in which they were added. What is added to the folder later shows when the bank
    is opened again.
    """

    def __init__(self, path: Path, record: BankRecord) -> None:
        self.path = path
        self._record = record
        self._numbers = {name: number for number, name in enumerate(record.names)}
        self._shards: dict[str, ShardReader] = {}

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a bank.

        Args:
            path: Its folder.

        Returns:
            The bank.

        Raises:
            UsageError: The folder holds no bank.
            CorruptBlob: Its record is damaged, or a shard is missing or was cut short.
        """
        path = Path(path)
        record = read_bank_record(path)
        for shard in record.shards:
            file = path / shard.file
            if not file.is_file() or file.stat().st_size != shard.nbytes:
                state = "is missing" if not file.is_file() else f"has {file.stat().st_size:,} bytes"
                raise CorruptBlob(
                    f"{file} {state}; {path / RECORD} says {shard.nbytes:,}.",
                    cure="Copy the bank again, or rebuild it.",
                )
        return cls(path, record)

    @classmethod
    def ingest(
        cls,
        source: str | Path,
        destination: str | Path,
        *,
        modules: Iterable[str] | None = None,
        select: str | None = None,
        base: str | None = None,
        convert: int | None = None,
        weights: str | Path | None = None,
        compress: bool = False,
        skip_bad: bool = False,
        progress: Progress = QUIET,
    ) -> Self:
        """Collect a folder of adapters into a bank, or add them to one that is there.

        Every adapter is named by its path in the folder, and all are added in the order of their names. They may change
        different modules of one model: a module that one of them lacks takes no change from it. What headers and
        settings tell is checked before the work; all problems are said at once. A call that was interrupted goes on
        where it stopped when it is made again, and adapters that the bank has already are not read again.

        Args:
            source: A folder with adapters in the layouts of peft, diffusers and kohya, mixed at will, at any depth; one
                adapter; or the published files of weights2weights (`all_weights.pt` with `weight_dimensions.pt` and
                `adapter_config.json`).
            destination: The bank's folder.
            modules: Names of the model's modules, as for `read_adapter`: then adapters of other models are bad.
            select: A pattern of `Select`: then only these modules are kept.
            base: Name of the model that all were trained on, whatever their files say.
            convert: The highest rank of what becomes of LoHa, LoKr, DoRA and full differences, whose error is kept in
                `provenance`; by default they are bad.
            weights: The base model's files, which DoRA's change depends on.
            compress: Whether to keep new shards compressed, bit for bit.
            skip_bad: Whether to leave out adapters that cannot be used; they are listed in `skipped`.
            progress: Where the work is shown.

        Returns:
            The bank.

        Raises:
            UsageError: Adapters share no module with most, or are of other shapes or bases; two have the same name or
                content; one holds NaN or has rank 0; there is none. Files and cures are named.
            Unsupported: An adapter is no LoRA.
            UnsafeInput: An adapter is a pickle.
            CorruptBlob: A file is damaged.
            OutputFailed: The disk is full or the place cannot be written.
        """
        from netweight.store.bank.ingest import find_published, ingest
        from netweight.store.lora_formats.parts import Conversion

        if find_published(Path(source)) is not None:
            from netweight.store.bank.published import import_published

            import_published(source, destination, compress=compress, skip_bad=skip_bad, progress=progress)
        else:
            ingest(
                Path(source),
                Path(destination),
                modules=modules,
                select=select,
                base=base,
                conversion=None if convert is None else Conversion(convert, None if weights is None else Path(weights)),
                compress=compress,
                skip_bad=skip_bad,
                progress=progress,
            )
        return cls.open(destination)

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        """Another process opens the bank anew."""
        return AdapterBank.open, (self.path,)

    def __len__(self) -> int:
        """Number of adapters."""
        return len(self._numbers)

    @property
    def names(self) -> list[str]:
        """Names of the adapters, by number."""
        return list(self._numbers)

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules that adapters change, sorted."""
        return tuple(self._record.modules)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Module name → rows and columns of its change."""
        return dict(self._record.modules)

    @property
    def kernels(self) -> dict[str, tuple[int, ...]]:
        """Names of convolutions → sides of their kernels, as `write_adapter` takes them."""
        return dict(self._record.kernels)

    @property
    def base(self) -> str | None:
        """Name of the model that the adapters were trained on, if their files said it."""
        return self._record.base

    @property
    def skipped(self) -> Mapping[str, str]:
        """Adapters that were left out, with the reason."""
        return dict(self._record.skipped)

    @property
    def provenance(self) -> Mapping[str, Mapping[str, str]]:
        """Adapter → what its file says of where it comes from: training, trigger words, licence."""
        return self._record.provenance

    @property
    def nbytes(self) -> int:
        """Bytes of the shards on disk."""
        return sum(shard.nbytes for shard in self._record.shards)

    @property
    def shards(self) -> int:
        """Number of files that the adapters are in."""
        return len(self._record.shards)

    @property
    def ranks(self) -> tuple[int, int]:
        """Lowest and highest rank of any module that an adapter changes."""
        ranks = [rank[rank > 0] for shard in self._record.shards for rank in [self._reader(shard).rank]]
        return min(int(rank.min()) for rank in ranks), max(int(rank.max()) for rank in ranks)

    @property
    def digest(self) -> str:
        """Digest of names and content; the same however the bank is split into shards, and compressed or not."""
        contents = [content for shard in self._record.shards for content in shard.contents]
        return digest_config(
            {
                "modules": self._record.modules,
                "kernels": self._record.kernels,
                "names": self.names,
                "contents": contents,
            }
        )

    def adapter(self, which: str | int) -> Adapter:
        """Read one adapter.

        Args:
            which: Its name or number; negative numbers count from the end.

        Returns:
            The adapter at its own rank; factors, scale and value are as they were, the dtype is that of its shard.

        Raises:
            NameNotFound: There is no such adapter.
        """
        number = self._number(which)
        return self.stack(number, number + 1).adapter(0)

    def stack(self, start: int, stop: int, modules: Collection[str] | None = None) -> AdapterStack:
        """Read adapters `start` to `stop`, and nothing else of the tensors on disk.

        Args:
            start: Number of the first.
            stop: Number after the last.
            modules: Only these; by default all.

        Returns:
            The stack; lower ranks are filled up with zeros to the highest in the range.

        Raises:
            UsageError: The range is empty or reaches beyond the bank.
            CorruptBlob: A shard is damaged.
        """
        from netweight.store.bank.shard import joined

        if not 0 <= start < stop <= len(self):
            raise UsageError(
                f"A bank of {len(self)} adapters has no range {start} to {stop}.", cure="Ask for 0 <= start < stop."
            )
        chosen = [name for name in self.modules if modules is None or name in modules]
        pieces, first = [], 0
        for shard in self._record.shards:
            low, high = max(start - first, 0), min(stop - first, len(shard.names))
            if low < high:
                pieces.append(self._reader(shard).rows(low, high, chosen))
            first += len(shard.names)
        return joined(chosen, pieces)

    def verify(self, *, progress: Progress = QUIET) -> None:
        """Compare every shard with its digest.

        Args:
            progress: Where progress is shown.

        Raises:
            CorruptBlob: Shards are damaged; they are named, with the adapters in them.
        """
        bad = []
        with progress.task("Checking shards", self.nbytes) as task:
            for shard in self._record.shards:
                if digest_file(self.path / shard.file) != shard.digest:
                    bad.append(f"{shard.file} (adapters {shard.names[0]} to {shard.names[-1]})")
                task.update(shard.nbytes)
        if bad:
            raise CorruptBlob(
                f"{self.path}: {len(bad)} of {len(self._record.shards)} shards are damaged: {', '.join(bad)}.",
                cure="Copy these files again, or rebuild the bank.",
            )

    def _reader(self, shard: ShardRecord) -> ShardReader:
        file = shard.file
        if file not in self._shards:
            if not (self.path / file).is_file():  # joined to another by a writer, after this bank was opened
                raise CorruptBlob(f"{self.path / file} is gone: the bank has changed.", cure="Open the bank again.")
            self._shards[file] = ShardReader(self.path / file, self.modules, shard)
        return self._shards[file]

    def _number(self, which: str | int) -> int:
        if isinstance(which, str):
            if which not in self._numbers:
                near = ", ".join(nearest_names(which, self._numbers))
                raise NameNotFound(f"The bank has no adapter {which!r}.", cure=f"The nearest names are {near}.")
            return self._numbers[which]
        if not -len(self) <= which < len(self):
            raise NameNotFound(f"The bank has no adapter {which}: it holds {len(self)}.")
        return which % len(self)
