//! For which GPUs the kernels are compiled.

/// What is compiled when `KVPOOL_CUDA_ARCHS` does not say: Ampere (A100; RTX 30), Ada, Hopper,
/// and PTX, from which the driver makes code for later ones.
pub(super) const DEFAULT: &str = "80,86,89,90+ptx";

/// The lowest compute capability: bf16, asynchronous copies and the matrix instructions in use.
pub(super) const LOWEST: u32 = 80;

/// One architecture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Arch {
    /// As in `sm_80`, `sm_90a`.
    pub(super) name: String,
    /// Whether PTX is kept beside the machine code.
    pub(super) ptx: bool,
}

impl Arch {
    /// As in `KVPOOL_CUDA_ARCHS`.
    pub(super) fn text(&self) -> String {
        format!("{}{}", self.name, if self.ptx { "+ptx" } else { "" })
    }

    /// nvcc's arguments.
    pub(super) fn flags(&self) -> [String; 2] {
        let Self { name, ptx } = self;
        let code = if *ptx { format!("[sm_{name},compute_{name}]") } else { format!("sm_{name}") };
        ["-gencode".to_owned(), format!("arch=compute_{name},code={code}")]
    }
}

/// Reads a list such as `80,90+ptx`; `sm_80` is taken for `80`.
///
/// # Errors
/// Says which entry is wrong.
pub(super) fn parse(list: &str) -> Result<Vec<Arch>, String> {
    let mut archs: Vec<Arch> = Vec::new();
    for entry in list.split([',', ';', ' ']).filter(|entry| !entry.is_empty()) {
        let (name, ptx) = match entry.strip_suffix("+ptx") {
            Some(name) => (name, true),
            None => (entry, false),
        };
        let name = name.strip_prefix("sm_").unwrap_or(name);
        let number = name.strip_suffix(['a', 'f']).unwrap_or(name);
        match number.parse::<u32>() {
            Ok(number) if number >= LOWEST => {}
            Ok(_) => return Err(format!("{entry:?} is older than sm_{LOWEST}, the lowest")),
            Err(_) => return Err(format!("{entry:?} is no architecture, such as 80 or 90+ptx")),
        }
        match archs.iter_mut().find(|arch| arch.name == name) {
            Some(arch) => arch.ptx |= ptx,
            None => archs.push(Arch { name: name.to_owned(), ptx }),
        }
    }
    if archs.is_empty() {
        return Err("it names no architecture".to_owned());
    }
    Ok(archs)
}

/// Those that the toolkit knows, and the names of the others. The PTX of one that it does not know
/// is made for the last one that it does, so that later GPUs are still served.
pub(super) fn known(archs: Vec<Arch>, codes: &[String]) -> (Vec<Arch>, Vec<String>) {
    let (mut known, unknown): (Vec<Arch>, Vec<Arch>) =
        archs.into_iter().partition(|arch| codes.contains(&arch.name));
    if unknown.iter().any(|arch| arch.ptx)
        && let Some(last) = known.last_mut()
    {
        last.ptx = true;
    }
    (known, unknown.into_iter().map(|arch| arch.name).collect())
}
