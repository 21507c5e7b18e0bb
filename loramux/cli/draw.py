"""`loramux draw`: draw images with adapters, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from loramux.cli.console import counting, say, show_error, working
from loramux.errors import InvalidRequest, LoramuxError

FORMATS = (".png", ".jpg", ".jpeg", ".webp")


IMAGE_MODEL = typer.Option(metavar="FOLDER", help="Image model: a folder that diffusers saved.")
IMAGE_LORA = typer.Option(metavar="NAME=FILE[@WEIGHT]", help="An adapter; repeat for more.")
ADAPTER = typer.Option(
    metavar="NAME[:WEIGHT]",
    help="Draw with this adapter; repeat to add several. Default: all of --image-lora.",
)
SIZE = typer.Option(metavar="WxH", help="Default: that of the model.")


def draw(  # noqa: PLR0913  (one for each flag)
    prompt: Annotated[str, typer.Argument(help="What the image shows.")],
    image_model: Annotated[Path, IMAGE_MODEL],
    image_lora: Annotated[list[str] | None, IMAGE_LORA] = None,
    adapter: Annotated[list[str] | None, ADAPTER] = None,
    out: Annotated[Path, typer.Option(help="File: .png, .jpg or .webp.")] = Path("image.png"),
    negative_prompt: Annotated[str, typer.Option(help="What it does not show.")] = "",
    size: Annotated[str | None, SIZE] = None,
    steps: Annotated[int | None, typer.Option(help="Default: that of the model.")] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="Default: the model's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Default: a random one.")] = None,
) -> None:
    """Draw an image with a diffusion model and LoRA adapters.

    [bold]Example[/bold]

    loramux draw "a red fox" --image-model ./flux --image-lora ink=ink.safetensors --adapter ink:0.6
    """
    from loramux.config.images import parse_image_lora, parse_size

    console = Console()
    try:
        if out.suffix.lower() not in FORMATS:
            raise InvalidRequest(f"--out must end with {', '.join(FORMATS)}.")
        loras = [parse_image_lora(text) for text in image_lora or ()]
        width, height = (None, None) if size is None else parse_size(size)
        with working("Loading the image model"):
            # Imported here: torch and diffusers take seconds, and `--help` needs neither.
            from loramux.diffusion.image_pipeline import Drawing, ImagePipeline

            pipeline = ImagePipeline(image_model)
            for lora in loras:
                pipeline.add_adapter(lora.name, lora.source)
        weights = {lora.name: lora.weight for lora in loras}
        drawing = Drawing(
            prompt=prompt,
            negative_prompt=negative_prompt,
            adapters=_selected(adapter, weights),
            width=width,
            height=height,
            steps=steps,
            guidance_scale=guidance_scale,
            seed=seed,
        )
        drawn = _draw(pipeline, drawing)
        drawn.save(out)
    except (LoramuxError, OSError) as error:
        show_error(Console(stderr=True), str(error))
        raise typer.Exit(2 if isinstance(error, InvalidRequest) else 1) from error
    say(console, "Image  ", f"{out} ({drawn.request.width}x{drawn.request.height})", style="bold")
    say(console, "Seed   ", str(drawn.seed), style="bold")
    say(console, "Digest ", drawn.digest, style="bold")
    say(console, "Seconds", f" {drawn.facts.denoise_s + drawn.facts.decode_s:.1f}", style="bold")


def _selected(adapters: list[str] | None, weights: dict[str, float]) -> dict[str, float]:
    """Returns the weights by name: those given, else those of --image-lora."""
    if adapters is None:
        return weights
    selected: dict[str, float] = {}
    for text in adapters:
        name, colon, weight = text.rpartition(":")
        if not colon:
            name, weight = text, str(weights.get(text, 1.0))
        if name in selected:
            raise InvalidRequest(f"--adapter names {name} twice.")
        try:
            selected[name] = float(weight)
        except ValueError as error:
            raise InvalidRequest(f"--adapter {text}: {weight!r} is not a weight.") from error
    return selected


def _draw(pipeline: Any, drawing: Any) -> Any:
    with counting("Steps") as show:
        return pipeline.draw(drawing, on_progress=lambda _, done, total: show(done, total))[0]
