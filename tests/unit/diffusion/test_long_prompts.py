"""Prompts of SDXL over 77 tokens and words with weights, against CLIP's own forwards."""

from __future__ import annotations

import msgspec
import pytest
import torch

from loramux.diffusion.engine import ImageEngine
from loramux.diffusion.families.base import Row
from loramux.diffusion.families.clip_prompts import chunks_of
from loramux.diffusion.families.find import family_of
from loramux.errors import InvalidRequest
from loramux.types.emphasis import Fragment
from tests.image_factory import (
    TEXT,
    draw_all,
    make_adapter,
    make_pipeline,
    request_for,
    shared_pipeline,
)

LONG = "a red fox in deep snow before an old barn " * 5
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def pipe():
    return shared_pipeline("sdxl")


@pytest.fixture(scope="module")
def family(pipe):
    return family_of(pipe)


@torch.no_grad()
def oracle(pipe, parts):
    """Encode the given chunks of (character, weight) one by one."""
    embeds, pooled = [], None
    for part in parts:
        both = []
        for tokenizer, encoder in (
            (pipe.tokenizer, pipe.text_encoder),
            (pipe.tokenizer_2, pipe.text_encoder_2),
        ):
            words = [tokenizer.convert_tokens_to_ids(one) for one, _ in part]
            ids = [1, *words, 2] + [0] * (75 - len(words))
            out = encoder(torch.tensor([ids]), output_hidden_states=True)
            state = out.hidden_states[-2]
            weights = torch.ones(77)
            weights[1 : len(part) + 1] = torch.tensor([weight for _, weight in part])
            weighed = state * weights[None, :, None]
            both.append(weighed * (state.mean() / weighed.mean()))
            if encoder is pipe.text_encoder_2 and pooled is None:
                pooled = out.text_embeds
        embeds.append(torch.cat(both, dim=-1))
    return torch.cat(embeds, dim=1), pooled


def plain(text):
    return [(one, 1.0) for one in text if one != " "]


@torch.no_grad()
@pytest.mark.parametrize("count", [0, 1, 40, 75])
def test_a_prompt_of_one_chunk_is_encoded_as_diffusers_does(pipe, family, count):
    text = "abcde" * 15
    got = family.encode(text[:count], 77)
    embeds, _, pooled, _ = pipe.encode_prompt(text[:count], do_classifier_free_guidance=False)
    assert torch.equal(got["embeds"], embeds) and torch.equal(got["pooled"], pooled)


@torch.no_grad()
def test_a_long_prompt_is_encoded_in_chunks(pipe, family):
    letters = plain(LONG)
    chunks = [letters[at : at + 75] for at in range(0, len(letters), 75)]
    assert len(chunks) == 3
    got, (embeds, pooled) = family.encode(LONG, 77), oracle(pipe, chunks)
    assert got["embeds"].shape == (1, 3 * 77, 64)
    assert (got["embeds"] - embeds).abs().max() < TOLERANCE
    assert (got["pooled"] - pooled).abs().max() < TOLERANCE


def test_a_chunk_ends_at_a_late_comma(pipe):
    def sizes(text):
        return [len(one.ids) for one in chunks_of(pipe.tokenizer, [Fragment(text)])]

    assert sizes("x" * 60 + "," + "y" * 30) == [61, 30]
    assert sizes("x" * 50 + "," + "y" * 30) == [75, 6]
    assert sizes("x" * 75 + "," + "y") == [75, 2]
    assert sizes("x" * 60 + "," + "y" * 14) == [75]


@torch.no_grad()
def test_brackets_weigh_embeddings_and_the_mean_stays(pipe, family):
    up, down = 1.1, 1 / 1.1
    part = [*plain("a"), *((one, up * up) for one in "red"), *plain("fox")]
    part += [(one, 1.4) for one in "in"] + [(one, down) for one in "snow"]
    got = family.encode_weighed("a ((red)) fox (in:1.4) [snow]", 77, is_negative=False)
    embeds, pooled = oracle(pipe, [part])
    assert (got["embeds"] - embeds).abs().max() < TOLERANCE
    assert (got["pooled"] - pooled).abs().max() < TOLERANCE
    unweighed = family.encode("a red fox in snow", 77)
    assert (got["embeds"] - unweighed["embeds"]).abs().max() > 0.01


def test_an_image_of_long_prompts_is_that_of_diffusers(pipe, family):
    """Drawn by the stock pipeline from the embeddings of both prompts."""
    request = request_for(
        "sdxl", "x", prompt=LONG, negative_prompt=LONG[::-1], guidance_scale=4.0, weighs_words=False
    )
    got = draw_all(ImageEngine(pipe), [request])["x"]
    texts = [oracle(pipe, [plain(t)[at : at + 75] for at in range(0, len(plain(t)), 75)])
             for t in (LONG, LONG[::-1])]  # fmt: skip
    stock = make_pipeline("sdxl")
    image = stock(
        prompt_embeds=texts[0][0],
        pooled_prompt_embeds=texts[0][1],
        negative_prompt_embeds=texts[1][0],
        negative_pooled_prompt_embeds=texts[1][1],
        guidance_scale=4.0,
        num_inference_steps=request.steps,
        height=request.height,
        width=request.width,
        generator=torch.Generator().manual_seed(request.seed),
        output_type="np",
    ).images[0]
    assert (got - torch.from_numpy(image)).abs().max() < TOLERANCE


@torch.no_grad()
def test_prompts_of_different_lengths_share_a_forward(pipe):
    engine = ImageEngine(make_pipeline("sdxl"))
    engine.add_adapter(make_adapter(pipe, "a", ("to_k", "to_v", *TEXT), rank=2))
    requests = [
        request_for("sdxl", "short", guidance_scale=3.0, negative_prompt=LONG),
        request_for("sdxl", "long", prompt=LONG, guidance_scale=3.0),
        request_for("sdxl", "lora", prompt=LONG[:120], selection=(("a", 0.8),)),
        request_for("sdxl", "weighed", prompt=f"(a:1.4) {LONG}", weighs_words=True),
    ]
    together = draw_all(engine, requests)
    assert engine.num_forwards == requests[0].steps
    for request in requests:
        again = msgspec.structs.replace(request, request_id="again")
        alone = draw_all(engine, [again])["again"]
        assert (alone - together[request.request_id]).abs().max() < TOLERANCE, request.request_id


@torch.no_grad()
def test_the_mask_hides_the_padding_alone(family):
    request = request_for("sdxl", "x")
    texts = [family.encode(text, 77) for text in ("a fox", LONG)]
    sampling = family.start(request, family.pipe.scheduler, torch.Generator().manual_seed(0))
    mixed = family.forward([Row(sampling, text) for text in texts])
    for got, text in zip(mixed, texts, strict=True):
        (alone,) = family.forward([Row(sampling, text)])
        assert (got - alone).abs().max() < TOLERANCE


def test_a_prompt_of_too_many_chunks_is_refused(pipe):
    engine = ImageEngine(pipe)
    engine.add(request_for("sdxl", "x", prompt="fox " * 50_000))
    (event,) = engine.step()
    with pytest.raises(InvalidRequest, match="at most 1200 tokens, got 150000"):
        raise event.error
