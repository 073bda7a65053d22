//! Group 20 (window patterns) and group 53 (scales).

use super::{GOOD, INT8, read, refused, refused_line, with_line};

#[test]
fn edge_20_a_window_pattern_shorter_than_the_layers_is_repeated() {
    for (pattern, windows) in [
        ("[128]", [128, 128, 128, 128]),
        ("[128, 0]", [128, 0, 128, 0]),
        ("[128, 128, 0]", [128, 128, 0, 128]),
        ("[1, 2, 3, 0]", [1, 2, 3, 0]),
        // Below a block, no multiple of a block, beyond the longest sequence.
        ("[1, 17, 99999]", [1, 17, 99_999, 1]),
    ] {
        let text = with_line(GOOD, 6, &format!("attention_window = {pattern}"));
        assert_eq!(read(&text).unwrap().geometry.windows, windows, "{pattern}");
    }
    assert_eq!(read(&with_line(GOOD, 6, "")).unwrap().geometry.windows, [0; 4]);
}

#[test]
fn edge_20_a_window_pattern_longer_than_the_layers_is_refused() {
    let key = "model.attention_window";
    let expectation = "expected a list of window lengths";
    let line = "attention_window = [1, 2, 3, 4, 5]";
    refused_line(GOOD, 6, line, key, &["has 5 entries, and the model has 4 layers", expectation]);
    refused_line(GOOD, 6, "attention_window = []", key, &["is an empty list", expectation]);
    refused_line(GOOD, 6, "attention_window = 128", key, &["found the integer 128", expectation]);
    let line = "attention_window = [128, -1]";
    let key = "model.attention_window.1";
    refused_line(GOOD, 6, line, key, &["found the integer -1", expectation]);
}

#[test]
fn edge_53_unusable_scales_are_refused_by_name() {
    assert!(read(INT8).is_ok());
    // On whatever device.
    let on_gpu = format!("{INT8}[device]\nkind = \"cuda\"\n");
    assert!(read(&on_gpu).is_ok());
    for (value, shown) in [
        ("0.0", "0 is no finite number above 0"),
        ("-0.5", "-0.5 is no"),
        ("nan", "NaN is no"),
        ("inf", "inf is no"),
        ("-inf", "-inf is no"),
        ("1e39", "inf is no"),
        ("1e-60", "0 is no"),
        ("\"big\"", "found the string \"big\""),
        ("[0.5]", "has 1 entry for 2 layers"),
        ("[0.5, 0.5, 0.5]", "has 3 entries for 2 layers"),
    ] {
        let line = format!("k_scale = {value}");
        let expectation = "expected a finite number above 0, or a list of one for each layer";
        for text in [INT8, &on_gpu] {
            refused_line(text, 15, &line, "cache.int8.k_scale", &[shown, expectation]);
        }
    }
    // An entry of a list has a line of its own.
    refused_line(INT8, 18, "-0.125,", "cache.int8.v_scale.1", &["-0.125 is no finite"]);
}

#[test]
fn edge_53_an_absent_scale_is_refused_by_name() {
    let text = with_line(INT8, 15, "");
    // What is not there is reported where it belongs: at the header of its table.
    refused(&text, "t.toml:13: cache.int8.k_scale: is missing", &["per-tensor", "; expected a"]);
    let start = INT8.find("v_scale").unwrap();
    refused(&INT8[..start], "t.toml:13: cache.int8.v_scale: is missing", &["; expected a"]);
}
