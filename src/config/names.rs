//! The choices of the file, written as the file writes them.

use std::fmt;

use super::{Admission, Arrivals, CacheMode, Format, KernelChoice, ScaleKind, Scrub, WorkloadKind};

/// A type whose values have one name each.
macro_rules! named {
    ($type:ident: $($value:ident = $name:literal),+ $(,)?) => {
        impl $type {
            /// The name in the file.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$value => $name,)+
                }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name())
            }
        }

        #[cfg(test)]
        impl $type {
            /// Every value.
            const ALL: &[Self] = &[$(Self::$value),+];
        }
    };
}

named!(CacheMode: Contiguous = "contiguous", Paged = "paged", Hybrid = "hybrid", Dynamic = "dynamic");
named!(Format: F32 = "f32", F16 = "f16", Bf16 = "bf16", Int8 = "int8");
named!(
    Admission: Guaranteed = "guaranteed",
    MaxUtilization = "max-utilization",
    StaticBatch = "static-batch",
);
named!(
    ScaleKind: PerTokenHead = "per-token-head",
    PerGroup32 = "per-group-32",
    PerTensor = "per-tensor",
);
named!(
    KernelChoice: Auto = "auto",
    Reference = "reference",
    Portable = "portable",
    Avx2 = "avx2",
    Avx512 = "avx512",
    Avx512Bf16 = "avx512-bf16",
);
named!(Scrub: Off = "off", OnRelease = "on-release", OnReuse = "on-reuse");
named!(
    WorkloadKind: Generator = "generator",
    AzureCsv = "azure-csv",
    MooncakeJsonl = "mooncake-jsonl",
    LengthsCsv = "lengths-csv",
    OpenaiJsonl = "openai-jsonl",
);
named!(
    Arrivals: AtOnce = "at-once",
    Trace = "trace",
    Poisson = "poisson",
    Bursts = "bursts",
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_serde_reads_and_writes() {
        macro_rules! check {
            ($($type:ident),+) => {
                $(for value in $type::ALL {
                    let written = toml::Value::try_from(value).unwrap();
                    assert_eq!(written.as_str(), Some(value.name()));
                    assert_eq!(written.try_into::<$type>().unwrap(), *value);
                })+
            };
        }
        check!(
            CacheMode,
            Format,
            Admission,
            ScaleKind,
            KernelChoice,
            Scrub,
            WorkloadKind,
            Arrivals
        );
    }
}
