"""How images are cut for parity, and that a lost one is what the others and the pieces say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_ext.runtime.snapshot.parity import Stripe
from hyperpod_ext.runtime.snapshot.xor import xor_into

stripes = st.sets(st.integers(0, 500), min_size=3, max_size=7).map(lambda ranks: Stripe(tuple(sorted(ranks))))
images = st.binary(min_size=1, max_size=1500)


def pieces_of(stripe: Stripe, held: dict[int, bytes]) -> dict[int, bytearray]:
    pieces = {}
    for holder in stripe.ranks:
        piece = bytearray(max(stripe.piece_bytes(len(image)) for image in held.values()))
        for owner in stripe.others(holder):
            start, nbytes = stripe.span(owner, holder, len(held[owner]))
            xor_into(memoryview(piece), memoryview(held[owner])[start : start + nbytes])
        pieces[holder] = piece
    return pieces


@given(stripes, st.data())
def test_any_one_image_is_what_the_others_and_their_pieces_say(stripe, data):
    held = {rank: data.draw(images) for rank in stripe.ranks}
    pieces = pieces_of(stripe, held)
    for lost in stripe.ranks:
        rebuilt = b""
        for holder, (_, nbytes) in stripe.spans(lost, len(held[lost])).items():
            part = bytearray(pieces[holder])
            for other in stripe.others(lost, holder):
                start, length = stripe.span(other, holder, len(held[other]))
                xor_into(memoryview(part), memoryview(held[other])[start : start + length])
            rebuilt += part[:nbytes]
        assert rebuilt == held[lost]


@given(stripes, st.integers(0, 10_000), st.data())
def test_the_parts_of_an_image_are_all_of_it_once(stripe, nbytes, data):
    owner = data.draw(st.sampled_from(stripe.ranks))
    spans = stripe.spans(owner, nbytes)
    assert set(spans) == set(stripe.ranks) - {owner}
    at = 0
    for start, length in spans.values():
        assert start == at
        assert 0 <= length <= stripe.piece_bytes(nbytes)
        at += length
    assert at == nbytes


def test_a_piece_takes_a_share_of_an_image():
    assert Stripe((0, 1, 2)).piece_bytes(1 << 20) == 1 << 19
    assert Stripe((0, 1, 2, 3, 4)).piece_bytes(1 << 20) == 1 << 18


@pytest.mark.parametrize("ranks", [(0, 1), (2, 1, 0), (0, 0, 1)])
def test_what_is_no_stripe_is_refused(ranks):
    with pytest.raises(ValueError, match="at least three ranks in ascending order"):
        Stripe(ranks)
