//! How lengths and numbers of turns are drawn.

use serde::{Deserialize, Serialize};

use super::complaint::Complaint;

/// The accepted forms of a length distribution.
pub(super) const DISTRIBUTIONS: &str = "expected { dist = \"fixed\", value = 128 }, { dist = \"uniform\", min = 16, max = 256 }, \
     { dist = \"lognormal\", median = 128, sigma = 0.8, min = 8, max = 512 } or { dist = \"bimodal\", median = 128, \
     second_median = 4096, second_share = 0.1, sigma = 0.5, min = 8, max = 8192 }";

/// How a length in tokens, or a number of turns, is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "dist", rename_all = "lowercase", try_from = "RawLength")]
pub enum LengthDistribution {
    /// Always the same.
    Fixed {
        /// The length.
        value: u32,
    },
    /// Each length of a range with the same probability.
    Uniform {
        /// The shortest.
        min: u32,
        /// The longest; it can occur.
        max: u32,
    },
    /// The exponential of a normal distribution, cut off at both ends.
    Lognormal {
        /// Half of the lengths are shorter.
        median: f64,
        /// The standard deviation of the length's logarithm.
        sigma: f64,
        /// Shorter lengths become this one.
        min: u32,
        /// Longer lengths become this one.
        max: u32,
    },
    /// Two lognormal distributions: short questions, and now and then a document.
    Bimodal {
        /// The median of the first.
        median: f64,
        /// The median of the second.
        second_median: f64,
        /// How many of all lengths are drawn from the second, from 0 to 1.
        second_share: f64,
        /// The standard deviation of the length's logarithm, of both.
        sigma: f64,
        /// Shorter lengths become this one.
        min: u32,
        /// Longer lengths become this one.
        max: u32,
    },
}

/// A distribution as it is written. serde would read a tagged enum through a buffer, and forget
/// which key of it was wrong.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawLength {
    dist: Dist,
    value: Option<u32>,
    min: Option<u32>,
    max: Option<u32>,
    median: Option<f64>,
    sigma: Option<f64>,
    second_median: Option<f64>,
    second_share: Option<f64>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Dist {
    Fixed,
    Uniform,
    Lognormal,
    Bimodal,
}

/// A complaint about a field of a distribution, as the text of a serde error.
struct BadLength(String);

impl std::fmt::Display for BadLength {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl BadLength {
    fn new(key: &str, problem: impl Into<String>) -> Self {
        Self(Complaint::with_help(key, problem, DISTRIBUTIONS).into_serde_text())
    }
}

impl TryFrom<RawLength> for LengthDistribution {
    type Error = BadLength;

    fn try_from(raw: RawLength) -> Result<Self, BadLength> {
        let (name, fields): (_, &[&str]) = match raw.dist {
            Dist::Fixed => ("fixed", &["value"]),
            Dist::Uniform => ("uniform", &["min", "max"]),
            Dist::Lognormal => ("lognormal", &["median", "sigma", "min", "max"]),
            Dist::Bimodal => {
                ("bimodal", &["median", "second_median", "second_share", "sigma", "min", "max"])
            }
        };
        for (key, given) in [
            ("value", raw.value.is_some()),
            ("min", raw.min.is_some()),
            ("max", raw.max.is_some()),
            ("median", raw.median.is_some()),
            ("sigma", raw.sigma.is_some()),
            ("second_median", raw.second_median.is_some()),
            ("second_share", raw.second_share.is_some()),
        ] {
            if given && !fields.contains(&key) {
                return Err(BadLength::new(key, format!("does not belong to dist = {name:?}")));
            }
        }
        let missing =
            |key| move || BadLength::new(key, format!("is missing; dist = {name:?} needs it"));
        let distribution = match raw.dist {
            Dist::Fixed => Self::Fixed { value: raw.value.ok_or_else(missing("value"))? },
            Dist::Uniform => Self::Uniform {
                min: raw.min.ok_or_else(missing("min"))?,
                max: raw.max.ok_or_else(missing("max"))?,
            },
            Dist::Lognormal => Self::Lognormal {
                median: raw.median.ok_or_else(missing("median"))?,
                sigma: raw.sigma.ok_or_else(missing("sigma"))?,
                min: raw.min.ok_or_else(missing("min"))?,
                max: raw.max.ok_or_else(missing("max"))?,
            },
            Dist::Bimodal => Self::Bimodal {
                median: raw.median.ok_or_else(missing("median"))?,
                second_median: raw.second_median.ok_or_else(missing("second_median"))?,
                second_share: raw.second_share.ok_or_else(missing("second_share"))?,
                sigma: raw.sigma.ok_or_else(missing("sigma"))?,
                min: raw.min.ok_or_else(missing("min"))?,
                max: raw.max.ok_or_else(missing("max"))?,
            },
        };
        distribution.in_range()
    }
}

impl LengthDistribution {
    /// The longest length that can be drawn.
    #[must_use]
    pub fn longest(&self) -> u32 {
        match *self {
            Self::Fixed { value } => value,
            Self::Uniform { max, .. } | Self::Lognormal { max, .. } | Self::Bimodal { max, .. } => {
                max
            }
        }
    }

    /// The least that can be drawn, and the field that says so.
    pub(super) fn least(&self) -> (&'static str, u32) {
        match *self {
            Self::Fixed { value } => ("value", value),
            Self::Uniform { min, .. } | Self::Lognormal { min, .. } | Self::Bimodal { min, .. } => {
                ("min", min)
            }
        }
    }

    fn in_range(self) -> Result<Self, BadLength> {
        match self {
            Self::Fixed { .. } => {}
            Self::Uniform { min, max }
            | Self::Lognormal { min, max, .. }
            | Self::Bimodal { min, max, .. } => {
                if min > max {
                    return Err(BadLength::new("min", format!("is {min}, more than max = {max}")));
                }
            }
        }
        if let Self::Lognormal { min: 0, .. } | Self::Bimodal { min: 0, .. } = self {
            // What is drawn is rounded up.
            return Err(BadLength::new("min", "is 0, and what is drawn is above 0; write 1"));
        }
        if let Self::Lognormal { median, sigma, .. } | Self::Bimodal { median, sigma, .. } = self {
            check_median("median", median)?;
            if !(sigma.is_finite() && sigma >= 0.0) {
                let problem = format!("{sigma} is not a finite number of 0 or more");
                return Err(BadLength::new("sigma", problem));
            }
        }
        if let Self::Bimodal { second_median, second_share, .. } = self {
            check_median("second_median", second_median)?;
            if !(0.0..=1.0).contains(&second_share) {
                let problem = format!("{second_share} is not a number from 0 to 1");
                return Err(BadLength::new("second_share", problem));
            }
        }
        Ok(self)
    }
}

fn check_median(key: &str, median: f64) -> Result<(), BadLength> {
    if median.is_finite() && median > 0.0 {
        return Ok(());
    }
    Err(BadLength::new(key, format!("{median} is not a finite number above 0")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distributions_are_read_and_checked() {
        let read = |text: &str| toml::from_str::<LengthDistribution>(text);
        assert_eq!(
            read("dist = 'lognormal'\nmedian = 9\nsigma = 0.5\nmin = 1\nmax = 20").unwrap(),
            LengthDistribution::Lognormal { median: 9.0, sigma: 0.5, min: 1, max: 20 }
        );
        for (text, key) in [
            ("dist = 'fixed'", "value"),
            ("dist = 'fixed'\nvalue = 1\nmin = 1", "min"),
            ("dist = 'uniform'\nmin = 1", "max"),
            ("dist = 'uniform'\nmin = 5\nmax = 4", "min"),
            ("dist = 'lognormal'\nmedian = 9\nsigma = 1\nmin = 0\nmax = 20", "min"),
            ("dist = 'lognormal'\nmedian = nan\nsigma = 0.5\nmin = 1\nmax = 20", "median"),
            ("dist = 'lognormal'\nmedian = 9\nsigma = -1\nmin = 1\nmax = 20", "sigma"),
            ("dist = 'bimodal'\nmedian = 9\nsigma = 1\nmin = 1\nmax = 20", "second_median"),
            (
                "dist = 'bimodal'\nmedian = 9\nsecond_median = 20\nsecond_share = 1.5\nsigma = 1\n\
                 min = 1\nmax = 20",
                "second_share",
            ),
            ("dist = 'fixed'\nvalue = 4\nsecond_share = 0.5", "second_share"),
            ("dist = 'lognormal'\nmedian = 9\nsigma = inf\nmin = 1\nmax = 20", "sigma"),
        ] {
            let error = read(text).unwrap_err();
            let complaint = Complaint::from_serde_text("", error.message()).unwrap();
            assert_eq!(complaint.key, key, "{text}");
        }
        let uniform = LengthDistribution::Uniform { min: 1, max: 9 };
        assert_eq!((uniform.least(), uniform.longest()), (("min", 1), 9));
        assert_eq!(LengthDistribution::Fixed { value: 0 }.least(), ("value", 0));
    }
}
