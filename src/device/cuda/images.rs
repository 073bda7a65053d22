//! The kernels that the build compiled, and on which GPUs they run.

/// A fatbin: one file of `csrc/inst`, for several architectures.
#[derive(Clone, Copy, Debug)]
pub(super) struct Image {
    /// The file's name.
    pub(super) name: &'static str,
    pub(super) bytes: &'static [u8],
}

/// How this build came by its kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Build {
    /// nvcc compiled them.
    With {
        /// Its path.
        nvcc: &'static str,
        /// What led to it: a variable, `PATH` or a usual place.
        through: &'static str,
        /// Its CUDA version.
        version: (u32, u32),
        /// The architectures of the machine code, such as `80`.
        archs: &'static [&'static str],
        /// Those of which there is PTX too, from which the driver makes code for later GPUs.
        ptx: &'static [&'static str],
        /// Both as `KVPOOL_CUDA_ARCHS` has them: `80,90+ptx`.
        list: &'static str,
    },
    /// There are none, for this reason.
    Without(&'static str),
}

include!(concat!(env!("OUT_DIR"), "/cuda_images.rs"));

/// The oldest driver that the calls in use are known to work with.
pub(super) const OLDEST_DRIVER: (u32, u32) = (11, 8);

/// What the emulated driver takes for an image: it has its kernels inside.
pub(super) const EMULATED_IMAGE: &[u8] = b"kvpool: the kernels of the emulator\0";

/// What runs on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Served {
    /// Machine code that was compiled for it.
    Code,
    /// PTX that the driver compiles for it.
    Ptx,
    /// Nothing.
    No,
}

/// What of these architectures runs on a GPU of this compute capability. Machine code runs on the
/// same major number from its minor number on, PTX on everything later; what ends in `a` only on
/// the very same.
pub(super) fn serves(archs: &[&str], ptx: &[&str], capability: (u32, u32)) -> Served {
    let code = archs.iter().any(|arch| match parts(arch) {
        Some((major, minor, false)) => major == capability.0 && minor <= capability.1,
        Some((major, minor, true)) => (major, minor) == capability,
        None => false,
    });
    let later = ptx.iter().any(|arch| {
        parts(arch).is_some_and(|(major, minor, only)| !only && (major, minor) <= capability)
    });
    match (code, later) {
        (true, _) => Served::Code,
        (false, true) => Served::Ptx,
        (false, false) => Served::No,
    }
}

/// Major and minor number of `90` or `90a`, and whether it is for that very GPU only.
fn parts(arch: &str) -> Option<(u32, u32, bool)> {
    let number = arch.trim_end_matches(['a', 'f']);
    let value: u32 = number.parse().ok()?;
    Some((value / 10, value % 10, number.len() < arch.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_runs_on_its_major_number_and_ptx_on_everything_later() {
        let (archs, ptx) = (["80", "86", "90"], ["90"]);
        for (capability, served) in [
            ((7, 5), Served::No),
            ((8, 0), Served::Code),
            ((8, 6), Served::Code),
            ((8, 9), Served::Code),
            ((9, 0), Served::Code),
            ((10, 0), Served::Ptx),
            ((12, 0), Served::Ptx),
        ] {
            assert_eq!(serves(&archs, &ptx, capability), served, "{capability:?}");
        }
        assert_eq!(serves(&["86"], &[], (8, 0)), Served::No, "older than the code");
        assert_eq!(serves(&["90a"], &["90a"], (10, 0)), Served::No, "for one GPU only");
        assert_eq!(serves(&["90a"], &[], (9, 0)), Served::Code);
        assert_eq!(serves(&[], &[], (9, 0)), Served::No);
    }
}
