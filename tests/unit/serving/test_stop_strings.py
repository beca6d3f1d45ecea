"""Stop texts: found where they first end, whatever the pieces, and nothing is held back that need not be."""

from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.serving.stop_strings import StopStrings

WORDS = st.text("ab", min_size=1, max_size=4)


def by_hand(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.lists(st.text("abc", max_size=5), max_size=8), st.lists(WORDS, max_size=3))
def test_pieces_join_to_the_text_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    watch, given_out, so_far = StopStrings(stops), "", ""
    for piece in pieces:
        given_out, so_far = given_out + watch.push(piece), so_far + piece
        expected, found = by_hand(so_far, stops)
        assert watch.found == found
        if found is not None:
            assert given_out == expected
        else:  # the shortest end is held back that could still become a stop text
            ends = [so_far[cut:] for cut in range(len(so_far))]
            pending = max((len(end) for end in ends if any(stop.startswith(end) for stop in stops)), default=0)
            assert given_out == so_far[: len(so_far) - pending]
    given_out += watch.flush()
    assert given_out == by_hand("".join(pieces), stops)[0]
    assert watch.flush() == ""


def test_a_stop_that_spans_pieces() -> None:
    watch = StopStrings(["###", "END"])
    assert [watch.push(piece) for piece in ("a #", "#", "b E", "N", "Dc", "more")] == ["a ", "", "##b ", "", "", ""]
    assert watch.found == "END"
    assert watch.flush() == ""
