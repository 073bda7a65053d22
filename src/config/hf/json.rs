//! JSON values together with the lines they stand on, which `serde_json` does not keep.

use std::collections::HashMap;
use std::path::Path;

use serde_json::{Map, Value};

use crate::config::locate::MAX_KEY_BYTES;
use crate::error::{ConfigError, Origin};

/// Reads a JSON text.
pub(super) fn parse(text: &str, path: &Path) -> Result<Value, ConfigError> {
    serde_json::from_str(text).map_err(|error| ConfigError::Syntax {
        origin: Origin::File { path: path.to_owned(), line: error.line() },
        problem: format!("is no JSON: {error}"),
    })
}

/// A JSON value in words.
pub(super) fn describe(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(flag) => flag.to_string(),
        Value::Number(number) => format!("the number {number}"),
        Value::String(text) => format!("the string {text:?}"),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}

/// One object of the file, which can tell the line of each of its keys.
pub(super) struct Object<'a> {
    map: &'a Map<String, Value>,
    path: &'a Path,
    /// The dotted keys from the root to this object, with a dot at the end.
    prefix: String,
    lines: HashMap<String, usize>,
}

impl<'a> Object<'a> {
    /// The object that the file consists of.
    pub(super) fn root(root: &'a Value, text: &str, path: &'a Path) -> Result<Self, ConfigError> {
        match root {
            Value::Object(map) => Ok(Self { map, path, prefix: String::new(), lines: lines(text) }),
            other => Err(ConfigError::Syntax {
                origin: Origin::File { path: path.to_owned(), line: 1 },
                problem: format!(
                    "holds {}; expected the object of a Hugging Face config.json",
                    describe(other)
                ),
            }),
        }
    }

    /// The value of a key; `None` when it is absent or null.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Whether the key is there, be it null.
    pub(super) fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// The object below a key.
    pub(super) fn object(&self, key: &str) -> Result<Option<Self>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Self {
                map,
                path: self.path,
                prefix: format!("{}{key}.", self.prefix),
                lines: self.lines.clone(),
            })),
            Some(other) => Err(self.wrong(key, other, "expected an object")),
        }
    }

    /// The text below a key.
    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(key, other, "expected a string")),
        }
    }

    /// The truth value below a key.
    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(self.wrong(key, other, "expected true or false")),
        }
    }

    /// The number below a key.
    pub(super) fn number(&self, key: &str) -> Result<Option<u32>, ConfigError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
        match number {
            Some(number) => Ok(Some(number)),
            None => Err(self.wrong(key, value, "expected a whole number of at most 32 bits")),
        }
    }

    /// The number below a key, or the default; an error when there is neither.
    pub(super) fn required(&self, key: &str, default: Option<u32>) -> Result<u32, ConfigError> {
        self.number(key)?.or(default).ok_or_else(|| {
            self.refuse(
                key,
                "is missing",
                "expected a whole number; is this a model's config.json?",
            )
        })
    }

    /// The error of a value of the wrong type.
    fn wrong(&self, key: &str, found: &Value, expected: &str) -> ConfigError {
        self.refuse(key, format!("found {}", describe(found)), expected)
    }

    /// An error about a key of this object, on the key's line if it is there.
    pub(super) fn refuse(
        &self,
        key: &str,
        problem: impl Into<String>,
        help: impl Into<String>,
    ) -> ConfigError {
        let key = format!("{}{key}", self.prefix);
        let line = self
            .lines
            .get(&key)
            .or_else(|| self.lines.get(self.prefix.trim_end_matches('.')))
            .copied()
            .unwrap_or(0);
        ConfigError::Key {
            origin: Origin::File { path: self.path.to_owned(), line },
            key,
            problem: problem.into(),
            help: help.into(),
        }
    }
}

/// The line of every key that lies in objects only, by its dotted path. The text must be valid
/// JSON: a string followed by a colon is then a key, and nothing else is.
fn lines(text: &str) -> HashMap<String, usize> {
    let bytes = text.as_bytes();
    let mut lines = HashMap::new();
    // The dotted path of each open bracket; `None` inside a list, whose entries have no key.
    let mut open: Vec<Option<String>> = Vec::new();
    let mut key: Option<String> = None;
    let (mut at, mut line) = (0, 1);
    while at < bytes.len() {
        match bytes[at] {
            b'\n' => line += 1,
            b'"' => {
                let start = at + 1;
                at = start;
                while bytes[at] != b'"' {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
                let rest = bytes[at + 1..].iter().find(|byte| !byte.is_ascii_whitespace());
                if rest == Some(&b':')
                    && let Some(Some(prefix)) = open.last()
                {
                    let noted = prefix.len() + (at - start) <= MAX_KEY_BYTES;
                    key = noted.then(|| format!("{prefix}{}", &text[start..at]));
                    if let Some(path) = &key {
                        lines.insert(path.clone(), line);
                    }
                }
            }
            b'{' => {
                let prefix = match (open.last(), key.take()) {
                    (None, _) => Some(String::new()),
                    (Some(_), key) => key.map(|key| format!("{key}.")),
                };
                open.push(prefix);
            }
            b'[' => {
                key = None;
                open.push(None);
            }
            b'}' | b']' => {
                open.pop();
            }
            _ => {}
        }
        at += 1;
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_found_on_their_lines() {
        let text = "{\n \"a\": \"x\\\"y: {\",\n \"b\": {\n  \"a\": [1,\n {\"c\": 2}],\n \"d\"\n: 3}, \"e\": 4}";
        let lines = lines(text);
        for (key, line) in [("a", 2), ("b", 3), ("b.a", 4), ("b.d", 6), ("e", 7)] {
            assert_eq!(lines.get(key), Some(&line), "{key}");
        }
        assert_eq!(lines.len(), 5);
    }

    #[test]
    fn long_names_take_no_memory() {
        let name = "n".repeat(100_000);
        let inner: String = (0..1000).map(|n| format!("\"k{n}\": 1,\n")).collect();
        let text = format!("{{\"a\": 1, \"{name}\": {{{inner}\"x\": 1}}, \"b\": 2}}");
        let lines = lines(&text);
        assert_eq!((lines.len(), lines["a"], lines["b"]), (2, 1, 1001));
    }
}
