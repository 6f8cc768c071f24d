"""Numbers and names as people read them."""

from spmdkit.foundation.formatting import (
    all_visible,
    bounded,
    counted,
    format_bytes,
    format_count,
    format_error,
    format_seconds,
    format_share,
    nearest,
    visible,
)


def test_a_time_has_three_digits_and_its_unit():
    found = [format_seconds(s) for s in (0, 2e-8, 8.5e-4, 0.9996e-3, 0.0231, 0.9999, 2.423, 999.9, 1234.5)]
    assert found == ["0 s", "0.02 us", "850 us", "1 ms", "23.1 ms", "1 s", "2.42 s", "1000 s", "1234 s"]


def test_a_count_is_rounded_before_its_unit():
    found = [format_count(n) for n in (0, 0.5, 950, 999.4, 999.6, 12_400, 999_950, 8.03e9, 2e12)]
    assert found == ["0", "0.5", "950", "999", "1k", "12.4k", "1M", "8.03B", "2T"]


def test_a_size_has_binary_units():
    found = [format_bytes(n) for n in (0, 512, 1536, 12.6 * 2**30, 5000 * 2**30)]
    assert found == ["0 B", "512 B", "1.5 KiB", "12.6 GiB", "5000.0 GiB"]


def test_only_a_name_that_is_close_is_offered():
    assert nearest("tensr", ["tensor", "data"]) == " Did you mean 'tensor'?"
    assert nearest("xyz", ["tensor", "data"]) == ""


def test_control_characters_are_escaped():
    assert visible("a\x1b[31m\r\u202e\udcff\x9b") == "a\\x1b[31m\\r\\u202e\\udcff\\x9b"
    assert visible("Größe 5 µs\n\tx 中") == "Größe 5 µs\n\tx 中"
    assert all_visible({"\x07": ["\x07", 3, None]}) == {"\\x07": ["\\x07", 3, None]}


def test_a_message_fits_on_a_screen():
    found = bounded("\n".join(["first", *["x" * 10_000] * 100, "last"])).splitlines()
    assert len(found) <= 25 and max(map(len, found)) < 1001
    assert (found[0], found[-1]) == ("first", "last")
    assert bounded("short\ntext") == "short\ntext"


def test_small_shares_errors_and_nouns():
    assert [format_share(x) for x in (0.0, 0.004, 0.0099, 0.01, 0.426, 1.0)] == [
        "0%",
        "<1%",
        "<1%",
        "1%",
        "43%",
        "100%",
    ]
    assert [format_error(x) for x in (0.0, 8.3e-7, 0.17, 4.0)] == ["0", "8e-07", "0.17", "4"]
    found = [counted(1, "process"), counted(2, "process"), counted(0, "case"), counted(3, "leaf", "leaves")]
    assert found == ["1 process", "2 processes", "0 cases", "3 leaves"]
