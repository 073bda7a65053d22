//! Every reader: what it takes, what it refuses and with which words, and damaged lines of any
//! kind.

use proptest::prelude::*;

use super::*;
use crate::config::trickle::Trickle;
use crate::config::{ArrivalUnit, ColumnsConfig};

const AZURE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";

fn config(kind: WorkloadKind) -> WorkloadConfig {
    WorkloadConfig::new(kind)
}

fn timed(kind: WorkloadKind) -> WorkloadConfig {
    WorkloadConfig { arrivals: Arrivals::Trace, ..config(kind) }
}

/// Reads all of a text: `[arrival, prompt, output]` of each request.
fn read(text: &[u8], config: &WorkloadConfig) -> Result<(Vec<[i64; 3]>, Damaged), String> {
    read_from(text, config)
}

/// As [`read`], from any reader.
fn read_from(
    text: impl BufRead,
    config: &WorkloadConfig,
) -> Result<(Vec<[i64; 3]>, Damaged), String> {
    let all = || -> Result<_, JobError> {
        let mut trace = Reader::new(text, Path::new("t.csv"), config)?;
        let (mut rows, mut ids) = (Vec::new(), Vec::new());
        while let Some(row) = trace.next_row(&mut ids)? {
            rows.push([row.arrival_ns, row.prompt_tokens.into(), row.output_tokens.into()]);
        }
        Ok((rows, trace.damaged()))
    };
    all().map_err(|error| error.to_string())
}

fn rows(text: &str, config: &WorkloadConfig) -> Vec<[i64; 3]> {
    read(text.as_bytes(), config).expect(text).0
}

fn azure(rest: &str) -> String {
    format!("{AZURE}\n{rest}")
}

#[test]
fn azure_traces_are_read() {
    let lines = "2023-11-16 18:15:46.5,374,44\n2023-11-16 18:15:50.5,396,109";
    let plain = config(WorkloadKind::AzureCsv);
    let expected = [[0, 374, 44], [0, 396, 109]];
    assert_eq!(rows(&azure(lines), &plain), expected);
    assert_eq!(rows(&azure(&format!("{lines}\n")), &plain), expected);
    assert_eq!(rows(&azure(&format!("{lines}\n\n\n")), &plain), expected, "blank last lines");
    let crlf = azure(&format!("{lines}\n\n")).replace('\n', "\r\n");
    assert_eq!(rows(&crlf, &plain), expected);
    assert_eq!(rows(&azure(""), &plain), [[0; 3]; 0]);
    assert_eq!(rows(&format!("\u{feff}{}", azure(lines)), &plain), expected);
    let arriving = rows(&azure(lines), &timed(WorkloadKind::AzureCsv));
    assert_eq!(arriving[1][0] - arriving[0][0], 4_000_000_000);
}

#[test]
fn edge_63_mistakes_are_told_with_their_line() {
    for (rest, line, words) in [
        ("t,1,1\nt,-3,1\n", 3, "ContextTokens is \"-3\"; expected a whole number"),
        ("t,1,x\n", 2, "GeneratedTokens is \"x\""),
        ("t,1,0\n", 2, "GeneratedTokens is \"0\""),
        ("t,1.5,1\n", 2, "ContextTokens is \"1.5\""),
        ("t,4294967296,1\n", 2, "from 1 to 4294967295"),
        ("t,1\n", 2, "expected 3 columns (TIMESTAMP,ContextTokens,GeneratedTokens), found 2"),
        ("t,1,1,1\n", 2, "found 4"),
        (",1,1\n", 2, "TIMESTAMP is empty"),
        ("t,1,1\n\nt,1,1\n", 3, "the line is blank"),
    ] {
        let error = read(azure(rest).as_bytes(), &config(WorkloadKind::AzureCsv)).expect_err(rest);
        assert!(error.starts_with(&format!("t.csv:{line}: ")) && error.contains(words), "{error}");
    }
    let error =
        read(azure("t,1,1").as_bytes(), &timed(WorkloadKind::AzureCsv)).expect_err("no time");
    assert!(error.contains("t.csv:2: TIMESTAMP is \"t\"; expected a date and time"), "{error}");
}

#[test]
fn edge_63_what_is_no_trace_is_refused() {
    let of_azure = config(WorkloadKind::AzureCsv);
    let error = read(b"", &of_azure).expect_err("empty");
    assert!(error.contains("t.csv:1: expected the header") && error.contains("an empty file"));
    let error = read(b"num_prefill_tokens,num_decode_tokens\n1,2\n", &of_azure).expect_err("other");
    assert!(error.contains("found \"num_prefill_tokens"), "{error}");
    let long = azure(&format!("t,1,1\n{},1,1\n", "t".repeat(50_000)));
    let error = read(long.as_bytes(), &of_azure).expect_err("a long line");
    assert!(error.starts_with("t.csv:3: the line is longer than 4096 bytes"), "{error}");
    let mut binary = azure("t,1,1\n").into_bytes();
    binary.extend_from_slice(b"t,\xFF,1\n");
    let error = read(&binary, &of_azure).expect_err("not UTF-8");
    assert!(error.starts_with("t.csv:3: byte 0xff is not UTF-8"), "{error}");
    for (text, words) in [
        ("", "expected a header with one of ContextTokens, num_prefill_tokens"),
        ("a,b\n1,2\n", "say which column it is with workload.columns.prompt"),
        ("prompt_tokens,b\n1,2\n", "workload.columns.output"),
    ] {
        let error = read(text.as_bytes(), &config(WorkloadKind::LengthsCsv)).expect_err(text);
        assert!(error.starts_with("t.csv:1: ") && error.contains(words), "{error}");
    }
}

#[test]
fn a_missing_trace_says_where_the_public_ones_are() {
    let at =
        |path: &str| WorkloadConfig { path: Some(path.into()), ..config(WorkloadKind::AzureCsv) };
    let error = open(&at("no/such.csv")).map(drop).expect_err("there is none").to_string();
    assert!(error.starts_with("no/such.csv: the trace cannot be read"), "{error}");
    for words in ["Azure/AzurePublicDataset", "kvcache-ai/Mooncake", "--set workload.path="] {
        assert!(error.contains(words), "{error}");
    }
    assert!(open(&at("src")).is_err(), "a directory");
}

#[test]
fn tables_of_lengths_are_found_by_their_names() {
    let csv = timed(WorkloadKind::LengthsCsv);
    let apex = "StartTimeOffset_ns,ContextTokens,GeneratedTokens\n618518284,304,822\n";
    assert_eq!(rows(apex, &csv), [[618_518_284, 304, 822]]);
    let vidur =
        "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.8\n";
    assert_eq!(rows(vidur, &config(WorkloadKind::LengthsCsv)), [[0, 3772, 54]]);
    let error = read(vidur.as_bytes(), &csv).expect_err("no arrivals");
    assert!(error.contains("has no column of arrivals"), "{error}");
    let columns = ColumnsConfig {
        prompt: Some("in".to_owned()),
        output: Some("out".to_owned()),
        arrival: Some("when".to_owned()),
        arrival_unit: Some(ArrivalUnit::Seconds),
    };
    let named = WorkloadConfig { columns, ..csv };
    assert_eq!(rows("out, when ,in\n5,0.25,7\n", &named), [[250_000_000, 7, 5]]);
    let error = read(b"out,in\n5,7\n", &named).expect_err("no arrivals");
    assert!(error.contains("the column \"when\" (workload.columns.arrival)"), "{error}");
}

/// A line of Mooncake's format.
fn hashed(time: u32, prompt: u32, output: u32) -> String {
    let ids: Vec<u32> = (0..prompt.div_ceil(512)).collect();
    format!(
        "{{\"timestamp\": {time}, \"input_length\": {prompt}, \"output_length\": {output}, \"hash_ids\": {ids:?}}}"
    )
}

/// Readings that take a byte, that a signal interrupts, or that fail: in lines that are taken, and
/// in one that is too long and passed over.
#[test]
fn edge_61_readings_that_are_short_or_fail() {
    let long = format!("t,{},1\n", "1".repeat(5000));
    let csv =
        azure(&format!("2023-11-16 18:15:46.5,374,44\n{long}2023-11-16 18:15:50.5,396,109\n"));
    let mooncake = [hashed(0, 512, 3), "x".to_owned(), hashed(27_482, 1030, 52)].join("\n");
    for (kind, text) in [(WorkloadKind::AzureCsv, csv), (WorkloadKind::MooncakeJsonl, mooncake)] {
        // A damaged line is passed over; a file that cannot be read ends the job all the same.
        let skipping = WorkloadConfig { skip_damaged_lines: true, ..timed(kind) };
        let text = text.as_bytes();
        let whole = read(text, &skipping).expect("fine");
        assert_eq!((whole.0.len(), whole.1.lines), (2, 1), "{kind:?}");
        // Nothing of a buffer's size is read at once.
        let slow = BufReader::with_capacity(3, Trickle::new(text));
        assert_eq!(read_from(slow, &skipping), Ok(whole), "{kind:?}");
        for at in 0..text.len() {
            let failing = BufReader::new(Trickle::failing(text, at));
            let error = read_from(failing, &skipping).expect_err("it cannot be read");
            let line = 1 + text[..at].iter().filter(|byte| **byte == b'\n').count();
            assert!(error.starts_with(&format!("t.csv:{line}: cannot be read: ")), "{error}");
        }
    }
}

#[test]
fn mooncake_traces_are_read() {
    let of_mooncake = timed(WorkloadKind::MooncakeJsonl);
    let text = [hashed(0, 512, 3), hashed(27_482, 1030, 52)].join("\n");
    assert_eq!(rows(&text, &of_mooncake), [[0, 512, 3], [27_482_000_000, 1030, 52]]);
    let mut trace = Reader::new(text.as_bytes(), Path::new("t"), &of_mooncake).expect("fine");
    let mut ids = vec![9];
    trace.next_row(&mut ids).expect("fine");
    assert_eq!(ids, [0]);
    trace.next_row(&mut ids).expect("fine");
    assert_eq!(ids, [0, 1, 2]);
    for (line, words) in [
        ("{}", "missing field `timestamp`"),
        ("x", "expected value at column 1 in \"x\""),
        (hashed(0, 0, 3).as_str(), "input_length is 0; expected a whole number"),
        (hashed(0, 3, 0).as_str(), "output_length is 0"),
        (
            hashed(0, 3, 1).replace("[0]", "[0, 1]").as_str(),
            "hash_ids has 2 entries; expected 1, one for each 512",
        ),
        (hashed(0, 3, 1).replace("[0]", "[-1]").as_str(), "invalid value: integer `-1`"),
        (
            hashed(0, 3, 1).replace("\"timestamp\": 0", "\"timestamp\": -4").as_str(),
            "timestamp is -4",
        ),
        (
            hashed(0, 3, 1).replace('3', "4294967296").as_str(),
            "invalid value: integer `4294967296`",
        ),
    ] {
        let text = format!("{}\n{line}\n", hashed(0, 9, 9));
        let error = read(text.as_bytes(), &of_mooncake).expect_err(line);
        assert!(error.starts_with("t.csv:2: ") && error.contains(words), "{error}");
    }
    let small = WorkloadConfig { hash_block_tokens: Some(16), ..of_mooncake };
    let line = hashed(0, 40, 1).replace("[0]", "[5, 6, 7]");
    assert_eq!(rows(&line, &small), [[0, 40, 1]]);
}

/// A line of a trace with these lengths, prompt and output.
type GoodLine = fn(u32, u32) -> String;

/// The kinds of traces, and a good line of each with these lengths.
fn kinds() -> [(WorkloadConfig, &'static str, GoodLine); 4] {
    [
        (timed(WorkloadKind::AzureCsv), AZURE, |p, o| format!("2023-11-16 18:15:46.68,{p},{o}")),
        (timed(WorkloadKind::LengthsCsv), "output_tokens,arrived_at,prompt_tokens", |p, o| {
            format!("{o},1.5,{p}")
        }),
        (timed(WorkloadKind::MooncakeJsonl), "", |p, o| hashed(1500, p, o)),
        (config(WorkloadKind::OpenaiJsonl), "", |p, o| {
            let tokens: Vec<u32> = (0..p).collect();
            format!("{{\"body\": {{\"prompt\": {tokens:?}, \"max_tokens\": {o}}}}}")
        }),
    ]
}

#[derive(Clone, Debug)]
enum Piece {
    Good(u32, u32),
    Bad(Vec<u8>),
}

/// A line that no reader takes: bytes without line breaks that are no request. A `!` before them
/// sees to it.
fn pieces() -> impl Strategy<Value = Vec<Piece>> {
    let byte = any::<u8>().prop_filter("no line break", |b| !matches!(b, b'\n' | b'\r'));
    let good = (1..3000_u32, 1..3000_u32).prop_map(|(p, o)| Piece::Good(p, o));
    let bad = prop::collection::vec(byte, 0..80).prop_map(|mut bytes| {
        bytes.insert(0, b'!');
        Piece::Bad(bytes)
    });
    prop::collection::vec(prop_oneof![good, bad], 0..20)
}

proptest! {
    #[test]
    fn edge_63_damaged_lines_are_counted_and_the_others_read(pieces in pieces()) {
        for (config, header, good) in kinds() {
            let mut text = Vec::new();
            if !header.is_empty() {
                text.extend_from_slice(format!("{header}\n").as_bytes());
            }
            let (mut expected, mut bad, mut first_bad) = (Vec::new(), 0, None);
            for (index, piece) in pieces.iter().enumerate() {
                match piece {
                    Piece::Good(prompt, output) => {
                        text.extend_from_slice(good(*prompt, *output).as_bytes());
                        expected.push([i64::from(*prompt), i64::from(*output)]);
                    }
                    Piece::Bad(bytes) => {
                        text.extend_from_slice(bytes);
                        bad += 1;
                        first_bad.get_or_insert(index + 1 + usize::from(!header.is_empty()));
                    }
                }
                text.push(b'\n');
            }
            let skipping = WorkloadConfig { skip_damaged_lines: true, ..config.clone() };
            let (rows, damaged) = read(&text, &skipping).expect("skips");
            let lengths: Vec<[i64; 2]> = rows.iter().map(|row| [row[1], row[2]]).collect();
            prop_assert_eq!(lengths, expected);
            prop_assert_eq!(damaged.lines, bad);
            let strict = read(&text, &config);
            match first_bad {
                None => prop_assert!(strict.is_ok()),
                Some(line) => {
                    let start = format!("t.csv:{line}: ");
                    prop_assert!(damaged.first.unwrap_or_default().starts_with(&start));
                    prop_assert!(strict.expect_err("damaged").starts_with(&start));
                }
            }
        }
    }

    #[test]
    fn edge_63_junk_is_never_more_than_an_error(
        junk in prop::collection::vec(any::<u8>(), 0..600),
        skip in any::<bool>(),
    ) {
        for (config, header, good) in kinds() {
            let config = WorkloadConfig { skip_damaged_lines: skip, ..config };
            let mut text = format!("{header}\n{}\n", good(5, 6)).into_bytes();
            text.extend_from_slice(&junk);
            for text in [&text, &junk] {
                if let Err(error) = read(text, &config) {
                    prop_assert!(error.starts_with("t.csv:"), "{}", error);
                }
            }
        }
    }
}
