//! `pool.capacity` as a text: `worst-case`, `tokens:N`, `blocks:N`, `budget:SIZE`, `budget:N%`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::units::Bytes;

use super::Capacity;
use super::complaint::Complaint;

/// The accepted forms.
pub(super) const FORMS: &str = "expected \"worst-case\", \"tokens:N\", \"blocks:N\" (N a whole number above 0) or \"budget:SIZE\" \
     with a size above 0 such as \"budget:24 GiB\", or \"budget:N%\" of the device's free memory, N from 1 to 100";

impl fmt::Display for Capacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WorstCase => f.write_str("worst-case"),
            Self::Tokens(tokens) => write!(f, "tokens:{tokens}"),
            Self::Blocks(blocks) => write!(f, "blocks:{blocks}"),
            // In bytes, so that reading it back gives the same capacity.
            Self::Budget(bytes) => write!(f, "budget:{}", bytes.get()),
            Self::BudgetPercent(percent) => write!(f, "budget:{percent}%"),
        }
    }
}

impl FromStr for Capacity {
    type Err = String;

    /// Reads any of the forms; the error says what is wrong with the text.
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "worst-case" {
            return Ok(Self::WorstCase);
        }
        let unknown = || format!("{text:?} is no capacity");
        let (form, amount) = text.split_once(':').ok_or_else(unknown)?;
        match form {
            "tokens" => count(text, amount).map(Self::Tokens),
            "blocks" => count(text, amount).map(Self::Blocks),
            "budget" => {
                if let Some(percent) = amount.trim().strip_suffix('%') {
                    return match percent.trim().parse() {
                        Ok(percent @ 1..=100) => Ok(Self::BudgetPercent(percent)),
                        _ => Err(format!("found {text:?}: {percent:?} is no number from 1 to 100")),
                    };
                }
                let bytes: Bytes =
                    amount.parse().map_err(|error| format!("found {text:?}: {error}"))?;
                if bytes == Bytes::ZERO {
                    return Err(format!("{text:?} holds nothing"));
                }
                Ok(Self::Budget(bytes))
            }
            _ => Err(unknown()),
        }
    }
}

/// The whole number above 0 of `tokens:N` and `blocks:N`.
fn count(text: &str, amount: &str) -> Result<u64, String> {
    let amount = amount.trim();
    let digits = amount.replace('_', "");
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!("found {text:?}: {amount:?} is not a whole number"));
    }
    match digits.parse() {
        Ok(0) => Err(format!("{text:?} holds nothing")),
        Ok(number) => Ok(number),
        Err(_) => Err(format!("found {text:?}: {amount} does not fit in 64 bits")),
    }
}

impl Serialize for Capacity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Capacity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(|problem: String| {
            de::Error::custom(Complaint::with_help("", problem, FORMS).into_serde_text())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_forms_are_read_and_written() {
        for (text, capacity, written) in [
            ("worst-case", Capacity::WorstCase, "worst-case"),
            ("tokens:200000", Capacity::Tokens(200_000), "tokens:200000"),
            ("tokens:200_000", Capacity::Tokens(200_000), "tokens:200000"),
            ("blocks:8192", Capacity::Blocks(8192), "blocks:8192"),
            ("budget:24 GiB", Capacity::Budget(Bytes(24 << 30)), "budget:25769803776"),
            ("budget:123", Capacity::Budget(Bytes(123)), "budget:123"),
            ("budget: 90 %", Capacity::BudgetPercent(90), "budget:90%"),
        ] {
            assert_eq!(text.parse(), Ok(capacity), "{text}");
            assert_eq!(capacity.to_string(), written);
            assert_eq!(written.parse(), Ok(capacity));
        }
    }

    #[test]
    fn anything_else_says_what_is_wrong() {
        for (text, problem) in [
            ("worst", "is no capacity"),
            ("", "is no capacity"),
            ("bytes:12", "is no capacity"),
            ("tokens:0", "holds nothing"),
            ("blocks:-1", "\"-1\" is not a whole number"),
            ("blocks:", "\"\" is not a whole number"),
            ("tokens:1.5", "is not a whole number"),
            ("tokens:99999999999999999999", "does not fit in 64 bits"),
            ("budget:16 GiBs", "\"16 GiBs\" is not a size"),
            ("budget:0", "holds nothing"),
            ("budget:-1", "is not a size"),
            ("budget:0%", "no number from 1 to 100"),
            ("budget:101%", "no number from 1 to 100"),
            ("budget:0.9%", "no number from 1 to 100"),
            ("budget:99999999999 TiB", "is 16 EiB or more"),
        ] {
            let error = text.parse::<Capacity>().unwrap_err();
            assert!(error.contains(problem), "{text}: {error}");
        }
    }
}
