"""All processes of a run give a case the same label, whatever the order of sets in each."""

from tests.labels import label


def test_sets_are_sorted_in_names_of_cases():
    strings = [frozenset(words) for words in ("ab", "ba")]
    assert [label(each) for each in strings] == ["frozenset({'a', 'b'})"] * 2
    assert label(({2, 1}, [{"b", "a"}], ({"a"},))) == "({1, 2}, [{'a', 'b'}], ({'a'},))"
    assert label((1, "a", object())).startswith("(1, 'a', <object object")
