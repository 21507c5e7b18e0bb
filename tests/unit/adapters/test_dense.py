from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.adapters.packed.dense import plan_dense
from loramux.types.model import LinearSpec

SITES = (
    LinearSpec(
        name="qkv",
        in_features=6,
        projections=("q_proj", "k_proj", "v_proj"),
        out_features=(6, 2, 2),
    ),
    LinearSpec(name="o", in_features=6, projections=("o_proj",), out_features=(6,)),
)
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_what_an_adapter_does_not_change_takes_no_room() -> None:
    layout = plan_dense(SITES, {(3, "v_proj"): 5})
    assert layout.num_elements == 5 * 6 + 5 * 2
    assert list(layout.places) == [(3, "qkv")]
    (piece,) = layout.places[3, "qkv"].slices
    assert (piece.rank_start, piece.out_start) == (0, 8)


@settings(max_examples=80, deadline=None)
@given(
    ranks=st.dictionaries(
        st.tuples(st.integers(0, 3), st.sampled_from(PROJECTIONS)),
        st.integers(1, 9),
        min_size=1,
    )
)
def test_the_pieces_fill_the_buffer_exactly_once(ranks: dict[tuple[int, str], int]) -> None:
    layout = plan_dense(SITES, ranks)
    used = [0] * layout.num_elements
    for place in layout.places.values():
        spans = [(place.a_offset, place.in_features * place.total_rank)]
        spans += [(piece.offset, piece.rank * piece.out_features) for piece in place.slices]
        for start, length in spans:
            for index in range(start, start + length):
                used[index] += 1
    assert set(used) == {1}
    assert layout.max_rank == max(ranks.values())
    assert layout.key == plan_dense(SITES, dict(reversed(ranks.items()))).key
