//! What is wrong with one setting, before it is known where the setting stands.
//!
//! The checks know keys and values; only the loader knows lines. So a check hands back a
//! [`Complaint`], and the loader turns it into a [`ConfigError::Key`] with its origin.

use crate::error::ConfigError;

use super::keys;

/// Parts the fields of a complaint inside a serde error, which is a text and nothing else. A unit
/// separator cannot stand in a TOML file, so no value that is quoted in a message contains one.
const SEPARATOR: char = '\u{1f}';

/// What is wrong with one setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Complaint {
    /// The dotted key.
    pub(super) key: String,
    /// What is wrong with it.
    pub(super) problem: String,
    /// What was expected, or what to do.
    pub(super) help: String,
}

impl Complaint {
    /// A complaint whose help is what the key expects.
    pub(super) fn new(key: impl Into<String>, problem: impl Into<String>) -> Self {
        let key = key.into();
        let help = keys::expected(&key).unwrap_or("see the documentation of this key").to_owned();
        Self { key, problem: problem.into(), help }
    }

    /// A complaint with a help of its own.
    pub(super) fn with_help(
        key: impl Into<String>,
        problem: impl Into<String>,
        help: impl Into<String>,
    ) -> Self {
        Self { key: key.into(), problem: problem.into(), help: help.into() }
    }

    /// Carries the complaint through serde. Its key is taken as relative to the value that is
    /// being read; an empty one means that value itself.
    pub(super) fn into_serde_text(self) -> String {
        format!("{}{SEPARATOR}{}{SEPARATOR}{}", self.key, self.problem, self.help)
    }

    /// The complaint that [`Self::into_serde_text`] put into `message`, about the value at `path`.
    pub(super) fn from_serde_text(path: &str, message: &str) -> Option<Self> {
        let mut parts = message.split(SEPARATOR);
        let (key, problem, help) = (parts.next()?, parts.next()?, parts.next()?);
        let key = match (path, key) {
            (_, "") => path.to_owned(),
            ("", _) => key.to_owned(),
            _ => format!("{path}.{key}"),
        };
        Some(Self::with_help(key, problem, help))
    }
}

/// A number as a message has it: with an exponent where there would be many digits.
pub(super) fn short(number: f64) -> String {
    let is_plain = number == 0.0 || (1e-6..1e15).contains(&number.abs());
    if is_plain { format!("{number}") } else { format!("{number:e}") }
}

/// Why a model cannot be resolved: a setting of the TOML file, or something in the file that it
/// points to.
#[derive(Debug)]
pub(super) enum Refused {
    /// A setting of the TOML file, still to be located.
    Setting(Complaint),
    /// Something in another file, located already.
    Elsewhere(ConfigError),
}

impl From<Complaint> for Refused {
    fn from(complaint: Complaint) -> Self {
        Self::Setting(complaint)
    }
}

impl From<ConfigError> for Refused {
    fn from(error: ConfigError) -> Self {
        Self::Elsewhere(error)
    }
}

/// The entry of `names` that `wrong` was most likely meant to be, if one is near.
pub(super) fn nearest<'a>(wrong: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    // A name longer than any of ours is no slip of the finger, and comparing it would take long.
    if wrong.len() > 64 {
        return None;
    }
    let limit = 1 + wrong.chars().count() / 4;
    names
        .map(|name| (edit_distance(wrong, name), name))
        .filter(|(distance, _)| *distance <= limit)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

/// How many characters must be put in, taken out or changed to turn `a` into `b`.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, left) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, right) in b.iter().enumerate() {
            let changed = diagonal + usize::from(left != *right);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_complaint_survives_serde() {
        let inner = Complaint::with_help("min", "is 9", "expected less");
        let outer = Complaint::from_serde_text("a.b", &inner.into_serde_text()).unwrap();
        assert_eq!(outer, Complaint::with_help("a.b.min", "is 9", "expected less"));
        assert_eq!(Complaint::from_serde_text("a", "some other message"), None);
    }

    #[test]
    fn numbers_have_few_digits() {
        let numbers = [0.0, -0.25, 3.5e14, 1e300, -1e-9, f64::INFINITY].map(short);
        assert_eq!(numbers, ["0", "-0.25", "350000000000000", "1e300", "-1e-9", "inf"]);
    }

    #[test]
    fn slips_are_recognised() {
        let names = || ["max_seqs", "max_seq_len", "mode"].into_iter();
        assert_eq!(nearest("max_seq", names()), Some("max_seqs"));
        assert_eq!(nearest("max_sequence_len", names()), Some("max_seq_len"));
        assert_eq!(nearest("frobnicate", names()), None);
        assert_eq!(edit_distance("kitten", "sitting"), 3);
    }
}
