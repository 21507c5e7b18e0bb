"""`loramux merge`: combine several adapters into a new one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from typer.core import TyperCommand

from loramux.adapters.recipe import (
    METHODS,
    SIGN_METHODS,
    SUM_METHOD,
    CombinationOptions,
    check_options,
    check_weights,
    make_recipe,
)
from loramux.cli.console import counting, say, size_text, working
from loramux.cli.push import CheckBaseFlag, check_on_base, show_pushed
from loramux.cli.registry_options import (
    DataFlag,
    RegistryFlag,
    RemoteStoreFlag,
    SharedCacheFlag,
    StoreOptions,
    open_library,
    reporting_errors,
)
from loramux.cli.registry_view import reference_text
from loramux.errors import AdapterNotFound, InvalidRequest
from loramux.registry.names import parse_push_reference

if TYPE_CHECKING:
    from loramux.adapters.combine.combine import CombinedAdapter
    from loramux.adapters.peft.reader import CheckedAdapter
    from loramux.adapters.recipe import Recipe
    from loramux.store.library import AdapterLibrary

WEIGHTS_FLAG = "--weights"
PATH_STARTS = ("/", ".", "~")


class MergeCommand(TyperCommand):
    """A command whose --weights takes several numbers, negative ones too."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        return super().parse_args(ctx, one_weight_per_flag(args))


def one_weight_per_flag(args: Sequence[str]) -> list[str]:
    """Repeat the flag: --weights 0.5 -1 becomes --weights=0.5 --weights=-1."""
    expanded: list[str] = []
    in_weights = False
    for arg in args:
        if arg == WEIGHTS_FLAG:
            in_weights = True
        elif in_weights and is_number(arg):
            expanded.append(f"{WEIGHTS_FLAG}={arg}")
        else:
            in_weights = False
            expanded.append(arg)
    return expanded


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


AdaptersArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="ADAPTER ADAPTER...",
        help="Adapter folders, or adapters of the registry: tenant/name, tenant/name@1.4.2, "
        "tenant/name@prod, cidv1:sha256:….",
    ),
]
WeightsFlag = Annotated[
    list[float] | None,
    typer.Option(
        WEIGHTS_FLAG,
        metavar="WEIGHT...",
        help="One for each adapter, in the same order; may be negative. Default: 1 each.",
        show_default=False,
    ),
]
CombinationFlag = Annotated[str, typer.Option(help=f"Method: {', '.join(METHODS)}.")]
DensityFlag = Annotated[
    float | None,
    typer.Option(
        help="Share of elements that ties, dare and magnitude_prune keep: over 0, at most 1."
    ),
]
SignMethodFlag = Annotated[
    str | None,
    typer.Option(
        help=f"How ties and dare_ties elect a sign: {' or '.join(SIGN_METHODS)}. Default: total.",
        show_default=False,
    ),
]
SeedFlag = Annotated[
    int | None,
    typer.Option(
        help="Seed of dare; the same seed gives the same bytes. Default: 0.", show_default=False
    ),
]
SvdRankFlag = Annotated[
    int | None,
    typer.Option(
        help="Rank of the result of an SVD method. Default: the largest rank of the adapters.",
        show_default=False,
    ),
]
DtypeFlag = Annotated[str, typer.Option(help="Dtype of the result: float32, bfloat16 or float16.")]
OutFlag = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Write a PEFT folder: a new or empty one."),
]
PushFlag = Annotated[
    str | None,
    typer.Option(
        metavar="TENANT/NAME[@VERSION]", help="Store the result in the registry, like `push`."
    ),
]
RecipeFlag = Annotated[
    bool,
    typer.Option(
        "--recipe",
        help="With --push: store the recipe alone. A sum is added up in the batch; other methods "
        "are made by the server on first use.",
    ),
]
AnyBaseFlag = Annotated[
    bool, typer.Option("--any-base", help="Allow adapters that record different base names.")
]


def merge(  # noqa: PLR0913  (one for each flag)
    adapters: AdaptersArgument,
    weights: WeightsFlag = None,
    combination: CombinationFlag = "cat",
    density: DensityFlag = None,
    majority_sign_method: SignMethodFlag = None,
    seed: SeedFlag = None,
    svd_rank: SvdRankFlag = None,
    dtype: DtypeFlag = "float32",
    out: OutFlag = None,
    push: PushFlag = None,
    as_recipe: RecipeFlag = False,
    any_base: AnyBaseFlag = False,
    check_base: CheckBaseFlag = None,
    shared_cache: SharedCacheFlag = None,
    remote_store: RemoteStoreFlag = None,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Combine adapters of one base model into a new adapter.

    `cat` is the exact weighted sum. The other methods are PEFT's. The base model is not needed.
    Exit status 0: made; 1: refused; 2: wrong usage.

    [bold]Examples[/bold]

    loramux merge ./sql ./german --weights 1 0.5 --out ./sql-german

    loramux merge alice/sql alice/german --combination ties --density 0.5 --push alice/both@1.0.0

    loramux merge alice/sql alice/german --weights 1 0.5 --push alice/both --recipe
    """
    with reporting_errors():
        options = check_options(
            CombinationOptions(
                method=combination,
                density=density,
                majority_sign_method=majority_sign_method,
                seed=seed,
                svd_rank=svd_rank,
                dtype=dtype,
            )
        )
        numbers = [1.0] * len(adapters) if weights is None else weights
        check_weights(len(adapters), numbers)
        check_destination(out, push)
        if as_recipe:
            check_recipe_flags(push, check_base)
    stored = StoreOptions(shared_cache=shared_cache, remote_store=remote_store)
    with ExitStack() as stack:
        opener = LibraryOpener(stack, lambda: open_library(registry, data, stored))
        stack.enter_context(reporting_errors())
        if as_recipe and push is not None:
            terms = list(zip(adapters, numbers, strict=True))
            push_recipe(opener.library, terms, push, options, any_base=any_base)
            return
        inputs = read_inputs(adapters, opener)
        recipe = make_recipe([one.adapter.cid for one in inputs], numbers, options)
        combined = run(recipe, inputs, any_base=any_base)
        keep(combined, inputs, opener, Destination(out, push, check_base))


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the result goes: one of `out` and `push` is given."""

    out: Path | None
    push: str | None
    check_base: Path | None
    """The base model on which the result is checked first."""


def keep(
    combined: CombinedAdapter, inputs: Sequence[Input], opener: LibraryOpener, to: Destination
) -> None:
    """Write the result, and push it if its destination is the registry."""
    names = {one.adapter.cid: one.name for one in inputs}
    with result_folder(to.out) as folder:
        write(folder, combined, names)
        if to.check_base is not None:
            check_on_base(folder, to.check_base)
        if to.push is not None:
            show_pushed(opener.library.push(folder, to.push), Console())
    if to.out is not None:
        say(Console(), "Merged   ", str(to.out), style="bold green")
    show_recipe(combined, names, Console())


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    name: str
    """The folder, or the name and version in the registry."""
    adapter: CheckedAdapter


class LibraryOpener:
    """Opens registry and store when they are first needed: a merge of folders needs neither."""

    def __init__(self, stack: ExitStack, open_now: Callable[[], object]) -> None:
        self._stack = stack
        self._open_now = open_now
        self._library: AdapterLibrary | None = None

    @classmethod
    def of(cls, library: AdapterLibrary) -> LibraryOpener:
        """Return an opener of a library that is open."""
        opener = cls(ExitStack(), lambda: None)
        opener._library = library
        return opener

    @property
    def library(self) -> AdapterLibrary:
        if self._library is None:
            self._library = self._stack.enter_context(self._open_now())  # type: ignore[arg-type]
        return self._library


def check_destination(out: Path | None, push: str | None) -> None:
    if (out is None) == (push is None):
        raise InvalidRequest("Give either --out DIR or --push TENANT/NAME[@VERSION].")
    if push is not None:
        parse_push_reference(push)
    if out is not None:
        from loramux.adapters.peft.writer import refuse_existing

        refuse_existing(out.expanduser().absolute())


def check_recipe_flags(push: str | None, check_base: Path | None) -> None:
    if push is None:
        raise InvalidRequest("--recipe stores a version: give --push TENANT/NAME[@VERSION].")
    if check_base is not None:
        raise InvalidRequest("--check-base checks files, and --recipe writes none. Leave one out.")


def push_recipe(
    library: AdapterLibrary,
    terms: Sequence[tuple[str, float]],
    reference: str,
    options: CombinationOptions,
    *,
    any_base: bool,
) -> None:
    """Push a version without files; the parts of a combination are first read and checked."""
    for text, _ in terms:
        if Path(text).expanduser().is_dir() or text.startswith(PATH_STARTS):
            raise InvalidRequest(
                f"A recipe is made of versions of the registry, and {text} is a folder. Push it "
                "first: loramux push."
            )
    if options.method != SUM_METHOD:
        from loramux.adapters.combine.combine import check_parts

        inputs = read_inputs([text for text, _ in terms], LibraryOpener.of(library))
        cids = [one.adapter.cid for one in inputs]
        check_parts(
            make_recipe(cids, [weight for _, weight in terms], options),
            {one.adapter.cid: one.adapter for one in inputs},
            names={one.adapter.cid: one.name for one in inputs},
            any_base=any_base,
        )
    show_pushed(library.push_recipe(terms, reference, options, any_base=any_base), Console())


def read_inputs(texts: Sequence[str], opener: LibraryOpener) -> list[Input]:
    # Imported here and below: torch takes seconds to import.
    from loramux.adapters.peft.unbound import read_without_base

    inputs: list[Input] = []
    for text in texts:
        with working(f"Reading {text}"):
            name, folder = find_folder(text, opener)
            inputs.append(Input(name, read_without_base(folder)))
        for other in inputs[:-1]:
            if other.adapter.cid == inputs[-1].adapter.cid:
                raise InvalidRequest(
                    f"{other.name} and {name} are the same adapter. Give it once, with its whole "
                    "weight.",
                    param="adapters",
                )
    return inputs


def find_folder(text: str, opener: LibraryOpener) -> tuple[str, Path]:
    """Return the name to show, and the folder of an adapter that is a folder or has a name."""
    path = Path(text).expanduser()
    if path.is_dir() or text.startswith(PATH_STARTS):
        return text, path
    library = opener.library
    try:
        resolved, folder = library.open(text)
    except (AdapterNotFound, InvalidRequest) as error:
        raise type(error)(
            f"{text!r} is no folder, and no adapter of the registry: {error}"
        ) from None
    return reference_text(resolved), folder


def run(recipe: Recipe, inputs: Sequence[Input], *, any_base: bool) -> CombinedAdapter:
    from loramux.adapters.combine.combine import combine

    with counting("Combining modules") as progress:
        return combine(
            recipe,
            {one.adapter.cid: one.adapter for one in inputs},
            names={one.adapter.cid: one.name for one in inputs},
            any_base=any_base,
            progress=progress,
        )


@contextmanager
def result_folder(out: Path | None) -> Iterator[Path]:
    """Yield the folder to write: it becomes `out`, or is temporary without one."""
    if out is None:
        with tempfile.TemporaryDirectory(prefix="loramux-merge-") as folder:
            yield Path(folder)
        return
    from loramux.adapters.peft.writer import new_folder

    with new_folder(out) as folder:
        yield folder


def write(folder: Path, combined: CombinedAdapter, names: dict[str, str]) -> None:
    from loramux.adapters.combine.combine import write_combined

    with working("Writing"):
        write_combined(folder, combined, names=names)


def show_recipe(combined: CombinedAdapter, names: dict[str, str], console: Console) -> None:
    recipe = combined.recipe
    say(console, "Method   ", recipe.method.name, style="bold")
    for part in recipe.parts:
        say(console, "Part     ", f"{part.weight:g} * {names[part.cid]} ({part.cid})", style="bold")
    size = f"{size_text(combined.size_bytes)}, {len(combined.modules)} modules"
    say(console, "Result   ", f"rank {combined.max_rank}, {size}", style="bold")
    say(console, "Recipe   ", recipe.cid, style="bold")
