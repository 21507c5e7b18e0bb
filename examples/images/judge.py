"""Judge the demo's image model: a classifier that was trained on the drawings names its images.

    python -m examples.images.judge icons.npz examples/images [--steps 20]

Draws every object with the base and with each adapter, in mixed batches, writes contact.png, and
prints how often the classifier finds the object and the style. It also prints the share of the
style along the adapter's weight, and how a sum of two adapters differs from both.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from examples.images.icons import BASE, OBJECTS
from examples.images.scenes import BACKGROUNDS, Scenes, make_scenes
from loramux import Drawing, ImagePipeline
from loramux.config.images import demo_images, parse_image_lora

WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
SUM = {"pixel": 0.7, "night": 0.8}
COLUMNS = 4


class Classifier(nn.Module):
    """Finds the object and the style of an image, from all of its pixels."""

    def __init__(self, num_objects: int, num_styles: int) -> None:
        super().__init__()
        self._counts = (num_objects, num_styles)
        wide = (3, 16, 32, 64, 128)
        self._layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.GroupNorm(8, b), nn.ReLU())
                for a, b in zip(wide, wide[1:], strict=False)
            ),
            nn.Flatten(),
            nn.Linear(wide[-1] * 16, sum(self._counts)),
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """`images`: [row, 3, 64, 64] in -1 to 1; returns the logits of objects and styles."""
        objects, styles = self._layers(images).split(self._counts, 1)
        return objects, styles


def train_classifier(scenes: Scenes, steps: int) -> Classifier:
    names, styles = list(OBJECTS), list(scenes.images)
    images = torch.cat(list(scenes.images.values()))
    objects = torch.tensor([names.index(name) for name in scenes.names]).repeat(len(styles))
    kinds = torch.arange(len(styles)).repeat_interleave(len(scenes.names))
    model = Classifier(len(names), len(styles))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        pick = torch.randint(len(images), (64,))
        right, down = torch.randint(-3, 4, (2,)).tolist()
        some = images[pick].roll((down, right), (2, 3))
        if torch.rand(()) < 0.5:
            some = functional.avg_pool2d(some, 3, 1, 1, count_include_pad=False)
        some = some + 0.2 * torch.rand(()) * torch.randn_like(some)
        found, style = model(some)
        loss = functional.cross_entropy(found, objects[pick], label_smoothing=0.05)
        loss = loss + functional.cross_entropy(style, kinds[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def draw(
    pipeline: ImagePipeline, prompts: list[str], selections: list[dict[str, float]], steps: int
) -> Tensor:
    """Return [selection, prompt, 3, 64, 64], -1 to 1; the prompts of a call share the batches."""
    drawings = [
        Drawing(prompt=prompt, adapters=adapters, seed=100 + number, steps=steps)
        for adapters in selections
        for number, prompt in enumerate(prompts)
    ]
    images = [one.pixels for one in pipeline.draw(drawings)]
    drawn = torch.stack(images).permute(0, 3, 1, 2) * 2 - 1
    return drawn.unflatten(0, (len(selections), len(prompts)))


def contact_sheet(drawn: Tensor) -> Image.Image:
    """Lay out [style, object, 3, 64, 64]: the styles of an object side by side."""
    cells = functional.pad(drawn, (1, 1, 1, 1), value=1).transpose(0, 1)
    rows = torch.cat(list(cells.unbind(1)), -1)
    rows = functional.pad(rows, (4, 4), value=1)
    high = -(-len(rows) // COLUMNS)
    columns = [torch.cat(list(part), 1) for part in rows.split(high)]
    sheet = torch.cat([functional.pad(c, (0, 0, 0, 66 * high - c.shape[1])) for c in columns], 2)
    return Image.fromarray(((sheet.clamp(-1, 1) + 1) * 127.5).byte().permute(1, 2, 0).numpy())


def share(found: Tensor, wanted: Tensor) -> float:
    return (found.argmax(1) == wanted).float().mean().item()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("icons", type=Path)
    parser.add_argument("folder", type=Path, help="with model/ and adapters/")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    scenes = make_scenes(options.icons)
    with torch.enable_grad():
        judge = train_classifier(scenes, 2000)
    styles, names = list(scenes.images), list(OBJECTS)
    wanted = torch.arange(len(names))

    model, loras = demo_images(options.folder)
    pipeline = ImagePipeline(model)
    for lora in map(parse_image_lora, loras):
        pipeline.add_adapter(lora.name, lora.source)
    colours = list(BACKGROUNDS)
    prompts = [
        f"{name} on a {colours[1 + number % (len(colours) - 1)]} background" if number % 2 else name
        for number, name in enumerate(names)
    ]
    adapters = [name for name in styles if name in pipeline.adapters]
    drawn = draw(pipeline, prompts, [{}, *({name: 1.0} for name in adapters)], options.steps)
    contact_sheet(drawn).save(options.folder / "contact.png")
    print("style   object found, on drawings   style found, on drawings")
    for style, images in zip([BASE, *adapters], drawn, strict=True):
        found, kinds = judge(images)
        real, real_kinds = judge(scenes.images[style])
        kind = torch.tensor(styles.index(style))
        truth = wanted.repeat_interleave(len(colours))
        print(
            f"{style:6} {share(found, wanted):6.0%} {share(real, truth):6.0%} "
            f"{share(kinds, kind):6.0%} {share(real_kinds, kind):6.0%}"
        )
    some = prompts[::5]
    for style in adapters:
        steps = draw(pipeline, some, [{style: weight} for weight in WEIGHTS], options.steps)
        odds = [judge(images)[1].softmax(1)[:, styles.index(style)].mean() for images in steps]
        print(f"{style} at {WEIGHTS}: share of the style", *(f"{each:.2f}" for each in odds))
    parts = [SUM, *({name: weight} for name, weight in SUM.items())]
    both, *single = draw(pipeline, some, parts, options.steps)
    for name, images in zip(SUM, single, strict=True):
        print(f"{SUM}: mean difference to {name} {(both - images).abs().mean() / 2:.3f}")
    print(f"{SUM}: objects found {share(judge(both)[0], wanted[::5]):.0%}")
    contact_sheet(torch.stack([single[0], single[1], both])).save(options.folder / "sums.png")


if __name__ == "__main__":
    main()
