//! A TOML text as values, and the line of every key in it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use toml::Table;
use toml::de::{DeTable, DeValue};

use crate::error::{ConfigError, Origin};

use super::complaint::Complaint;
use super::keys;

/// The longest dotted key whose line is noted, in bytes; those of settings are far shorter. Without
/// it, a name of half a file in front of every key of the other half would take gigabytes.
pub(super) const MAX_KEY_BYTES: usize = 256;

/// Where each setting was given.
#[derive(Clone, Debug)]
pub(super) struct Origins {
    path: PathBuf,
    /// The line of each dotted key of the file.
    lines: BTreeMap<String, usize>,
    /// The dotted keys that `--set` gave, with the tables that it made.
    overridden: BTreeSet<String>,
}

impl Origins {
    /// Where the key was given. A key that was not given has the origin of the table that it would
    /// stand in.
    pub(super) fn of(&self, key: &str) -> Origin {
        let mut key = key;
        loop {
            if self.overridden.contains(key) {
                return Origin::Override;
            }
            if let Some(line) = self.lines.get(key) {
                return self.line(*line);
            }
            match key.rsplit_once('.') {
                Some((parent, _)) => key = parent,
                None => return self.line(0),
            }
        }
    }

    /// A line of the file; 0 is the file as a whole.
    fn line(&self, line: usize) -> Origin {
        Origin::File { path: self.path.clone(), line }
    }

    /// Notes that the command line gave the key; whatever stood below it is gone.
    pub(super) fn override_key(&mut self, key: &str) {
        let below = format!("{key}.");
        self.lines.retain(|own, _| !own.starts_with(&below));
        self.overridden.insert(key.to_owned());
    }

    /// Whether the file or the command line has the key.
    pub(super) fn is_given(&self, key: &str) -> bool {
        self.lines.contains_key(key) || self.overridden.contains(key)
    }

    /// Forgets a key and all below it: the command line has taken it out.
    pub(super) fn take_out(&mut self, key: &str) {
        let is_out = |own: &str| {
            own.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        self.lines.retain(|own, _| !is_out(own));
        self.overridden.retain(|own| !is_out(own));
    }

    /// The complaint, with the place that it is about.
    pub(super) fn locate(&self, complaint: Complaint) -> ConfigError {
        let Complaint { key, problem, help } = complaint;
        ConfigError::Key { origin: self.of(&key), key, problem, help }
    }
}

/// One key of the file.
struct Entry {
    key: String,
    /// Where its name is written; the value itself for an entry of a list.
    name: Range<usize>,
    value: Range<usize>,
}

/// Reads the text. Errors are those of the syntax; keys and types are not looked at.
pub(super) fn read(text: &str, path: &Path) -> Result<(Table, Origins), ConfigError> {
    let lines = LineStarts::of(text);
    let at = |line| Origin::File { path: path.to_owned(), line };
    let (root, errors) = DeTable::parse_recoverable(text);
    let mut entries = Vec::new();
    collect(root.get_ref(), "", &mut entries);
    if let Some(error) = errors.first() {
        let span = error.span().unwrap_or_default();
        if error.message() == "duplicate key" {
            return Err(duplicate(text, path, &lines, &entries, span));
        }
        let problem = format!("is no TOML: {}", error.message().replace('\n', ", "));
        return Err(ConfigError::Syntax { origin: at(lines.line(span.start)), problem });
    }
    // The values come from a second reading, which refuses numbers that do not fit 64 bits.
    let table = toml::from_str::<Table>(text).map_err(|error| {
        let span = error.span().unwrap_or_default();
        let problem = error.message().replace('\n', ", ");
        let inside =
            |entry: &&Entry| entry.value.start <= span.start && span.end <= entry.value.end;
        match entries.iter().filter(inside).min_by_key(|entry| entry.value.len()) {
            Some(entry) => ConfigError::Key {
                origin: at(lines.line(span.start)),
                key: entry.key.clone(),
                problem,
                help: keys::expected(&entry.key).unwrap_or("expected a smaller number").to_owned(),
            },
            None => ConfigError::Syntax { origin: at(lines.line(span.start)), problem },
        }
    })?;
    let lines =
        entries.into_iter().map(|entry| (entry.key, lines.line(entry.name.start))).collect();
    Ok((table, Origins { path: path.to_owned(), lines, overridden: BTreeSet::new() }))
}

/// The error of a key or table that is there twice; `span` is the second one's name.
fn duplicate(
    text: &str,
    path: &Path,
    lines: &LineStarts,
    entries: &[Entry],
    span: Range<usize>,
) -> ConfigError {
    let name = text.get(span.clone()).unwrap_or_default();
    // The value of a table with a header is its header, so only an inline one encloses a key.
    let within = |entry: &&Entry| {
        text[entry.value.start..].starts_with('{')
            && (entry.value.start < span.start && span.end < entry.value.end)
    };
    let key = match entries.iter().filter(within).min_by_key(|entry| entry.value.len()) {
        Some(inline_table) => format!("{}.{name}", inline_table.key),
        None => full_key(text, span.start, name),
    };
    let line = lines.line(span.start);
    // The parser goes on with the second one of two tables, so the first is looked for.
    let first = entries
        .iter()
        .filter(|entry| entry.key == key)
        .map(|entry| lines.line(entry.name.start))
        .chain(text.lines().position(|line| header(line) == Some(&key)).map(|index| index + 1))
        .find(|first| *first < line);
    let problem = match first {
        Some(first) => format!("duplicate key, given on line {first} already"),
        None => "duplicate key".to_owned(),
    };
    ConfigError::Key {
        origin: Origin::File { path: path.to_owned(), line },
        key,
        problem,
        help: "expected every key once; keep one of the two".to_owned(),
    }
}

/// Appends the keys of a table, with those of the tables and lists in it.
fn collect(table: &DeTable<'_>, prefix: &str, entries: &mut Vec<Entry>) {
    for (name, value) in table {
        if prefix.len() + name.get_ref().len() > MAX_KEY_BYTES {
            continue;
        }
        let key = format!("{prefix}{}", name.get_ref());
        entries.push(Entry { key: key.clone(), name: name.span(), value: value.span() });
        collect_value(value.get_ref(), &key, entries);
    }
}

/// Appends what is inside a value.
fn collect_value(value: &DeValue<'_>, key: &str, entries: &mut Vec<Entry>) {
    match value {
        DeValue::Table(table) => collect(table, &format!("{key}."), entries),
        DeValue::Array(list) => {
            for (index, value) in list.iter().enumerate() {
                let key = format!("{key}.{index}");
                entries.push(Entry { key: key.clone(), name: value.span(), value: value.span() });
                collect_value(value.get_ref(), &key, entries);
            }
        }
        _ => {}
    }
}

/// The dotted key of a name at an offset: the last `[header]` above it, and the name.
fn full_key(text: &str, offset: usize, name: &str) -> String {
    let start = text[..offset].rfind('\n').map_or(0, |newline| newline + 1);
    let line = text[start..].lines().next().unwrap_or_default();
    if let Some(own) = header(line) {
        return own.to_owned();
    }
    match text[..start].lines().rev().find_map(header) {
        Some(table) => format!("{table}.{name}"),
        None => name.to_owned(),
    }
}

/// The key in a `[header]` or `[[header]]`, if the line is one.
fn header(line: &str) -> Option<&str> {
    let inner = line.trim_start().strip_prefix('[')?;
    let inner = inner.strip_prefix('[').unwrap_or(inner);
    inner.split_once(']').map(|(key, _)| key.trim())
}

/// The offset at which each line starts.
pub(super) struct LineStarts(Vec<usize>);

impl LineStarts {
    /// The lines of a text.
    pub(super) fn of(text: &str) -> Self {
        let newlines = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n');
        Self(std::iter::once(0).chain(newlines.map(|(at, _)| at + 1)).collect())
    }

    /// The line of an offset, counted from 1.
    pub(super) fn line(&self, offset: usize) -> usize {
        self.0.partition_point(|start| *start <= offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
[model]
attention_window = [
  7,
  'x',
]
[cache]
int8.scale = 'a'
[[variant]]
name = 'a'
[[variant]]
name = 'b'
threads = 2
[cache.hybrid]
contiguous_layers = 'windowed'
";

    fn line(origins: &Origins, key: &str) -> usize {
        match origins.of(key) {
            Origin::File { line, .. } => line,
            Origin::Override => panic!("{key}"),
        }
    }

    #[test]
    fn every_key_has_its_line() {
        let (_, origins) = read(TEXT, Path::new("t.toml")).unwrap();
        for (key, expected) in [
            ("model", 1),
            ("model.attention_window", 2),
            ("model.attention_window.1", 4),
            ("cache", 6),
            ("cache.int8.scale", 7),
            ("cache.int8.k_scale", 7),
            ("variant.0", 8),
            ("variant.1", 10),
            ("variant.1.name", 11),
            ("variant.1.threads", 12),
            ("cache.hybrid.contiguous_layers", 14),
            ("cache.mode", 6),
            ("limits.max_seqs", 0),
        ] {
            assert_eq!(line(&origins, key), expected, "{key}");
        }
    }

    /// A file whose keys, written out with their tables, would be far longer than it.
    #[test]
    fn long_names_take_no_memory() {
        let name = "n".repeat(100_000);
        let lines: String = (0..1000).map(|n| format!("k{n} = 1\n")).collect();
        let text = format!("[{name}]\n{lines}list = [{}]\n[cache]\n", "0,".repeat(1000));
        let (_, origins) = read(&text, Path::new("t.toml")).unwrap();
        let bytes: usize = origins.lines.keys().map(String::len).sum();
        assert!(bytes <= 1000, "{bytes} bytes of keys");
        assert_eq!(line(&origins, "cache"), 1003);
        assert_eq!(line(&origins, &format!("{name}.k1")), 0);
    }

    #[test]
    fn offsets_become_lines() {
        let lines = LineStarts::of("ab\n\nc");
        for (offset, line) in [(0, 1), (2, 1), (3, 2), (4, 3), (5, 3)] {
            assert_eq!(lines.line(offset), line);
        }
    }
}
