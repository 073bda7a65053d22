//! Counts, sizes and ids as types of their own, with checked arithmetic.
//!
//! A count of bytes, a count of tokens and a count of blocks are three different things; so
//! are the index of a block, of a sequence slot, of a layer and of a layer group. Sums and
//! products of counts either fit in 64 bits or are an [`Overflow`]: they never wrap and never
//! saturate.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A sum or product of sizes that does not fit in 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} does not fit in 64 bits ({left} {op} {right})")]
pub struct Overflow {
    /// What was being computed, for example `bytes`.
    pub what: &'static str,
    /// The left operand.
    pub left: u64,
    /// The operation: `+` or `×`.
    pub op: char,
    /// The right operand.
    pub right: u64,
}

macro_rules! count {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub u64);

        impl $name {
            /// No such thing at all.
            pub const ZERO: Self = Self(0);

            /// The bare number.
            #[must_use]
            pub const fn get(self) -> u64 {
                self.0
            }

            /// The sum.
            ///
            /// # Errors
            /// [`Overflow`] when it does not fit in 64 bits.
            pub fn try_add(self, other: Self) -> Result<Self, Overflow> {
                self.0.checked_add(other.0).map(Self).ok_or(Overflow {
                    what: $what,
                    left: self.0,
                    op: '+',
                    right: other.0,
                })
            }

            /// The product with a bare count.
            ///
            /// # Errors
            /// [`Overflow`] when it does not fit in 64 bits.
            pub fn try_mul(self, times: u64) -> Result<Self, Overflow> {
                self.0.checked_mul(times).map(Self).ok_or(Overflow {
                    what: $what,
                    left: self.0,
                    op: '×',
                    right: times,
                })
            }

            /// The next multiple of `step` that is not smaller.
            ///
            /// # Errors
            /// [`Overflow`] when it does not fit in 64 bits.
            pub fn align_up(self, step: u64) -> Result<Self, Overflow> {
                self.0.checked_next_multiple_of(step).map(Self).ok_or(Overflow {
                    what: $what,
                    left: self.0,
                    op: '+',
                    right: step,
                })
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&grouped(self.0))
            }
        }
    };
}

count!(
    /// A number of bytes.
    Bytes,
    "bytes"
);
count!(
    /// A number of tokens.
    Tokens,
    "tokens"
);
count!(
    /// A number of blocks.
    Blocks,
    "blocks"
);

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// The id as an index into a slice.
            #[must_use]
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

id!(
    /// Which block of a paged layer group, counted from 0.
    BlockId
);
id!(
    /// Which of the fixed places a sequence has, counted from 0.
    SeqSlot
);
id!(
    /// Which layer of the model, counted from 0.
    LayerIdx
);
id!(
    /// Which layer group of the plan, counted from 0.
    GroupIdx
);

/// Decimal digits in groups of three: `1,073,741,824`.
#[must_use]
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// A count and what is counted, whose plural ends in s, or in ies for y: `1 sequence`, `2,048
/// sequences`, `3 entries`.
#[must_use]
pub fn counted(count: u64, what: &str) -> String {
    let number = grouped(count);
    match what.strip_suffix('y') {
        _ if count == 1 => format!("{number} {what}"),
        Some(stem) => format!("{number} {stem}ies"),
        None => format!("{number} {what}s"),
    }
}

/// The binary units that sizes are read and written in, biggest first.
const BINARY_UNITS: [(&str, u64); 4] =
    [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

/// The decimal units that sizes are read in.
const DECIMAL_UNITS: [(&str, u64); 4] =
    [("TB", 1_000_000_000_000), ("GB", 1_000_000_000), ("MB", 1_000_000), ("KB", 1_000)];

impl Bytes {
    /// The size in the largest binary unit that it reaches: `3.125 GiB`, `512 B`.
    #[must_use]
    pub fn human(self) -> String {
        for (unit, size) in BINARY_UNITS {
            if self.0 >= size {
                #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
                let value = self.0 as f64 / size as f64;
                return format!("{value:.3} {unit}");
            }
        }
        format!("{} B", self.0)
    }
}

/// A text that is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is {}", if *.is_too_large { TOO_LARGE } else { NO_SIZE })]
pub struct SizeError {
    /// The text.
    pub text: String,
    /// Whether it is the size of more bytes than 64 bits can count.
    pub is_too_large: bool,
}

const TOO_LARGE: &str = "16 EiB or more, which is beyond any memory";
const NO_SIZE: &str = "not a size; write a number of bytes, or a number with B, KiB, MiB, GiB, TiB, KB, MB, GB or TB, \
     such as \"24 GiB\"";

impl FromStr for Bytes {
    type Err = SizeError;

    /// Reads `25769803776`, `24 GiB`, `24GiB` or `1.5 GiB`. A fraction must come to whole bytes.
    fn from_str(text: &str) -> Result<Self, SizeError> {
        let error = || SizeError { text: text.to_owned(), is_too_large: false };
        let too_large = || SizeError { text: text.to_owned(), is_too_large: true };
        let trimmed = text.trim();
        let split = trimmed
            .find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_'))
            .unwrap_or(trimmed.len());
        let (digits, unit) = trimmed.split_at(split);
        let unit = unit.trim_start();
        let factor = if unit.is_empty() || unit == "B" {
            1
        } else {
            BINARY_UNITS
                .iter()
                .chain(&DECIMAL_UNITS)
                .find(|(name, _)| *name == unit)
                .ok_or_else(error)?
                .1
        };
        let digits = digits.replace('_', "");
        let (whole, fraction) = digits.split_once('.').unwrap_or((&digits, ""));
        if whole.is_empty() || (digits.contains('.') && fraction.is_empty()) || fraction.len() > 9 {
            return Err(error());
        }
        // It is made of digits: what else can be wrong with it is that there are too many.
        let whole: u64 = whole.parse().map_err(|_| too_large())?;
        let mut bytes = whole.checked_mul(factor).ok_or_else(too_large)?;
        if !fraction.is_empty() {
            let parts = 10_u128.pow(u32::try_from(fraction.len()).map_err(|_| error())?);
            let numerator = fraction.parse::<u128>().map_err(|_| error())? * u128::from(factor);
            if numerator % parts != 0 {
                return Err(error());
            }
            let extra = u64::try_from(numerator / parts).map_err(|_| error())?;
            bytes = bytes.checked_add(extra).ok_or_else(too_large)?;
        }
        Ok(Self(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_exactly() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4_096", 4096),
            ("24 GiB", 24 << 30),
            ("24GiB", 24 << 30),
            ("1.5 GiB", 3 << 29),
            ("2 GB", 2_000_000_000),
            (" 512 MiB ", 512 << 20),
        ] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
        for text in ["", "GiB", "16 GiBs", "-1", "1.", ".5 GiB", "0.3 B", "1e9", "99999999999 TiB"]
        {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }

    #[test]
    fn arithmetic_refuses_to_wrap() {
        assert!(Bytes(u64::MAX).try_add(Bytes(1)).is_err());
        assert!(Bytes(1 << 40).try_mul(1 << 40).is_err());
        assert!(Bytes(u64::MAX).align_up(64).is_err());
        assert_eq!(Bytes(65).align_up(64), Ok(Bytes(128)));
    }

    #[test]
    fn numbers_read_well() {
        assert_eq!(grouped(1_073_741_824), "1,073,741,824");
        assert_eq!(grouped(999), "999");
        assert_eq!(counted(1, "block"), "1 block");
        assert_eq!(counted(0, "block"), "0 blocks");
        assert_eq!([counted(1, "entry"), counted(2, "entry")], ["1 entry", "2 entries"]);
        assert_eq!(counted(1024, "block"), "1,024 blocks");
        assert_eq!(Bytes(3_355_443_200).human(), "3.125 GiB");
        assert_eq!(Bytes(17).human(), "17 B");
    }
}
