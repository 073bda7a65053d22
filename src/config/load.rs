//! From a file to a checked [`Config`], with the origin of every setting.

use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::de::{self, Deserializer, Visitor};
use serde_path_to_error::Segment;
use toml::{Table, Value};

use crate::error::{ConfigError, Origin};
use crate::units::Bytes;

use super::complaint::{Complaint, Refused, nearest};
use super::locate::Origins;
use super::overlay::describe;
use super::{
    Config, Geometry, ModelFile, VariantConfig, check, keys, locate, model, overlay, variant,
};

/// The largest configuration file. Real ones have a few kilobytes; what is larger is some other
/// file, and is not worth parsing.
const MAX_BYTES: u64 = 1 << 20;

/// A configuration that was read and checked.
#[derive(Clone, Debug)]
pub struct Source {
    /// The settings, overrides included.
    pub config: Config,
    /// The model's geometry, whichever way the file names the model.
    pub geometry: Geometry,
    /// What `model.file` says of its model, where it is given.
    pub model_file: Option<ModelFile>,
    /// The file.
    pub path: PathBuf,
    origins: Origins,
}

impl Source {
    /// Where a setting was given, by its dotted key (`limits.max_seqs`, `variant.0.mode`). A
    /// setting that was not given has the origin of its table, or of the file as a whole (line 0).
    #[must_use]
    pub fn origin(&self, key: &str) -> Origin {
        self.origins.of(key)
    }

    /// The same file with other variants in place of its own: those of them that it accepts.
    #[must_use]
    pub fn with_variants(&self, variants: Vec<VariantConfig>) -> Self {
        let mut source = self.clone();
        source.config.sweep.clear();
        source.config.variant.clear();
        let accepted = |variant: &VariantConfig| {
            let effective = variant.apply(&source.config);
            variant.check(&effective).is_ok() && check::check(&effective, &self.geometry).is_ok()
        };
        source.config.variant = variants.into_iter().filter(accepted).collect();
        source
    }

    /// The effective configuration of each variant, by its name. A file without variants has one,
    /// named `default`: the file itself.
    #[must_use]
    pub fn variants(&self) -> Vec<(String, Config)> {
        if self.config.variant.is_empty() && self.config.sweep.is_empty() {
            return vec![("default".to_owned(), self.config.clone())];
        }
        let mode = self.config.cache.mode;
        let swept = self.config.sweep.iter().flat_map(|sweep| sweep.variants(mode));
        let variants = self.config.variant.iter().cloned().chain(swept);
        variants.map(|variant| (variant.name.clone(), variant.apply(&self.config))).collect()
    }
}

/// Reads a configuration file. `overrides` are `key=value` texts that replace settings of the
/// file, such as `limits.max_seqs=8`.
///
/// # Errors
/// [`ConfigError`]: the file cannot be read, is no TOML, or one of its settings is missing,
/// unknown, of the wrong type, out of range, or contradicts another.
pub fn load(path: &Path, overrides: &[String]) -> Result<Source, ConfigError> {
    parse(&read_text(path, MAX_BYTES)?, path, overrides)
}

/// Reads a configuration from a text. `path` names it in errors, and its folder is where a
/// relative `model.hf_config` starts from.
///
/// # Errors
/// As [`load`].
pub fn parse(text: &str, path: &Path, overrides: &[String]) -> Result<Source, ConfigError> {
    if text.len() as u64 > MAX_BYTES {
        return Err(too_large(path, MAX_BYTES));
    }
    let (mut table, mut origins) = locate::read(text, path)?;
    for argument in overrides {
        overlay::set(&mut table, &mut origins, argument)?;
    }
    if table.is_empty() {
        return Err(ConfigError::Syntax {
            origin: Origin::File { path: path.to_owned(), line: 0 },
            problem: "has no settings; expected at least [model], [limits] and [cache]".to_owned(),
        });
    }
    let located = |complaint| origins.locate(complaint);
    let mut config = deserialize(table).map_err(located)?;
    if let Some(workload) = &config.workload {
        workload.check(&|key| origins.is_given(key)).map_err(located)?;
    }
    let folder = path.parent().unwrap_or(Path::new(""));
    let (geometry, model_file) =
        model::resolve(&config.model, folder).map_err(|refused| match refused {
            Refused::Setting(complaint) => located(complaint),
            Refused::Elsewhere(error) => error,
        })?;
    if let Some(file) = &model_file {
        take_over(&mut config, file).map_err(located)?;
    }
    check::check(&config, &geometry).map_err(located)?;
    check_variants(&config, &geometry).map_err(located)?;
    Ok(Source { config, geometry, model_file, path: path.to_owned(), origins })
}

/// Takes over from a model file what else it says: how K is rotated, unless a workload makes K up,
/// and how long a sequence may be.
fn take_over(config: &mut Config, file: &ModelFile) -> Result<(), Complaint> {
    if config.limits.max_seq_len > file.context_len {
        return Err(Complaint::with_help(
            "limits.max_seq_len",
            format!(
                "is {}, and the model of model.file was trained on {} positions",
                config.limits.max_seq_len, file.context_len
            ),
            format!("expected {} at most", file.context_len),
        ));
    }
    match &config.rope {
        Some(rope) if *rope != file.rope => Err(Complaint::with_help(
            "rope",
            "is not as the model of model.file rotates",
            "remove [rope]; it is taken from the file",
        )),
        None if config.workload.is_none() => {
            config.rope = Some(file.rope.clone());
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Checks what every variant runs with, as if it were a file of its own.
fn check_variants(config: &Config, geometry: &Geometry) -> Result<(), Complaint> {
    variant::check_names(&config.variant)?;
    for (index, variant) in config.variant.iter().enumerate() {
        let effective = variant.apply(config);
        variant.check(&effective).map_err(|complaint| Complaint {
            key: format!("variant.{index}.{}", complaint.key),
            ..complaint
        })?;
        check::check(&effective, geometry)
            .map_err(|complaint| variant.own_complaint(index, complaint))?;
    }
    check_sweeps(config, geometry)
}

/// Checks every combination of every sweep, as [`check_variants`].
fn check_sweeps(config: &Config, geometry: &Geometry) -> Result<(), Complaint> {
    let mut names: HashSet<String> = config.variant.iter().map(|v| v.name.clone()).collect();
    let mut count = 0;
    for (index, sweep) in config.sweep.iter().enumerate() {
        count = sweep.check(index, count)?;
        for variant in sweep.variants(config.cache.mode) {
            let of_variant = |complaint: Complaint| Complaint {
                key: format!("sweep.{index}"),
                problem: format!(
                    "with variant {:?}, {}: {}",
                    variant.name, complaint.key, complaint.problem
                ),
                help: complaint.help,
            };
            variant::check_names(std::slice::from_ref(&variant)).map_err(of_variant)?;
            if !names.insert(variant.name.clone()) {
                return Err(Complaint::with_help(
                    format!("sweep.{index}"),
                    format!("{:?} is the name of another variant too", variant.name),
                    "give the sweep a name of its own, such as name = \"a\"",
                ));
            }
            let effective = variant.apply(config);
            variant.check(&effective).map_err(of_variant)?;
            check::check(&effective, geometry).map_err(of_variant)?;
        }
    }
    Ok(())
}

/// The text of a file of at most `max_bytes`.
pub(super) fn read_text(path: &Path, max_bytes: u64) -> Result<String, ConfigError> {
    let refused = |problem: String| ConfigError::Read { path: path.to_owned(), problem };
    let io = |error: std::io::Error| refused(error.to_string());
    let file = File::open(path).map_err(io)?;
    if file.metadata().map_err(io)?.is_dir() {
        return Err(refused("is a directory; expected a file".to_owned()));
    }
    // Not the length that the metadata tell: a device or a pipe has none.
    let mut bytes = Vec::new();
    file.take(max_bytes + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > max_bytes {
        return Err(too_large(path, max_bytes));
    }
    String::from_utf8(bytes).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        let before = &error.as_bytes()[..valid];
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
        ConfigError::Syntax {
            origin: Origin::File { path: path.to_owned(), line },
            problem: format!(
                "byte 0x{:02x} is not UTF-8; expected a text file in UTF-8",
                error.as_bytes()[valid]
            ),
        }
    })
}

/// The error of a file that is not worth reading.
fn too_large(path: &Path, max_bytes: u64) -> ConfigError {
    let limit = crate::units::grouped(max_bytes);
    ConfigError::Read {
        path: path.to_owned(),
        problem: format!("it is too large; expected a configuration of at most {limit} bytes"),
    }
}

/// The values as a [`Config`].
fn deserialize(table: Table) -> Result<Config, Complaint> {
    let root = Value::Table(table);
    for key in keys::TABLES {
        expect_table(&root, key)?;
    }
    let variants = find(&root, "variant").and_then(Value::as_array).map_or(0, Vec::len);
    for index in 0..variants {
        expect_table(&root, &format!("variant.{index}"))?;
    }
    serde_path_to_error::deserialize(root.clone())
        .map_err(|error| explain(&dotted(error.path()), error.inner().message(), &root))
}

/// A path as a dotted key; the index of a list is a part like any other.
fn dotted(path: &serde_path_to_error::Path) -> String {
    let part = |segment: &Segment| match segment {
        Segment::Seq { index } => Some(index.to_string()),
        Segment::Map { key } => Some(key.clone()),
        Segment::Enum { .. } | Segment::Unknown => None,
    };
    path.iter().filter_map(part).collect::<Vec<_>>().join(".")
}

/// Refuses anything but a table at a place that needs one, if something is there.
fn expect_table(root: &Value, key: &str) -> Result<(), Complaint> {
    match find(root, key) {
        None | Some(Value::Table(_)) => Ok(()),
        Some(other) => Err(Complaint::new(key, format!("found {}", describe(other)))),
    }
}

/// The value at a dotted key.
fn find<'a>(root: &'a Value, key: &str) -> Option<&'a Value> {
    key.split('.').try_fold(root, |value, part| match value {
        Value::Table(table) => table.get(part),
        Value::Array(list) => list.get(part.parse::<usize>().ok()?),
        _ => None,
    })
}

/// What serde says about the value at `path`, in the words of the file.
fn explain(path: &str, message: &str, root: &Value) -> Complaint {
    if let Some(complaint) = Complaint::from_serde_text(path, message) {
        return complaint;
    }
    // The names that serde quotes: first the key, then those that it knows.
    let mut quoted = message.split('`').skip(1).step_by(2);
    if message.starts_with("unknown field") {
        let name = quoted.next().unwrap_or_default();
        let known: Vec<&str> = quoted.collect();
        let listed = format!("expected one of {}", known.join(", "));
        let help = match nearest(name, known.into_iter()) {
            Some(near) => format!("did you mean {near}? {listed}"),
            None => listed,
        };
        return Complaint::with_help(path, "unknown key", help);
    }
    if message.starts_with("missing field") {
        let name = quoted.next().unwrap_or_default();
        let key = if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
        return Complaint::new(key, "is missing");
    }
    if path.starts_with("sweep.")
        && message.contains("expected a sequence")
        && let Some(value) = find(root, path)
    {
        let key = path.rsplit('.').next().unwrap_or(path);
        let help = format!("expected a list, such as {key} = [{value}]");
        return Complaint::with_help(path, format!("found {}", describe(value)), help);
    }
    let found = find(root, path)
        .map_or_else(|| message.to_owned(), |value| format!("found {}", describe(value)));
    match keys::expected(path) {
        Some(_) => Complaint::new(path, found),
        None => Complaint::with_help(path, found, message),
    }
}

/// Reads a size that is given as a number of bytes or as a text with a unit.
pub(super) fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
    deserializer.deserialize_any(SizeVisitor { may_be_none: false })
}

/// Reads a size that may be 0.
pub(super) fn size_or_none<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
    deserializer.deserialize_any(SizeVisitor { may_be_none: true })
}

struct SizeVisitor {
    may_be_none: bool,
}

impl SizeVisitor {
    /// A size that can be written back: TOML's integers have 63 bits and a sign.
    fn in_range<E: de::Error>(&self, bytes: Bytes, text: impl fmt::Debug) -> Result<Bytes, E> {
        let is_none = bytes == Bytes::ZERO && !self.may_be_none;
        if is_none || i64::try_from(bytes.get()).is_err() {
            let least = if self.may_be_none { "0 or more" } else { "above 0" };
            return Err(self.refuse(format!("{text:?} is out of range ({least}, below 8 EiB)")));
        }
        Ok(bytes)
    }

    fn refuse<E: de::Error>(&self, problem: String) -> E {
        let help = if self.may_be_none {
            "expected a number of bytes, 0 or more, or a size such as \"24 GiB\""
        } else {
            "expected a number of bytes above 0, or a size such as \"24 GiB\""
        };
        E::custom(Complaint::with_help("", problem, help).into_serde_text())
    }
}

impl Visitor<'_> for SizeVisitor {
    type Value = Bytes;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number of bytes, or a size such as \"24 GiB\"")
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Bytes, E> {
        let bytes = u64::try_from(number)
            .map_err(|_| self.refuse(format!("found the integer {number}")))?;
        self.in_range(Bytes(bytes), number)
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Bytes, E> {
        self.in_range(Bytes(number), number)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Bytes, E> {
        let bytes = text
            .parse()
            .map_err(|error: crate::units::SizeError| self.refuse(error.to_string()))?;
        self.in_range(bytes, text)
    }
}
