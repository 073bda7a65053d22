//! The header of a GGUF file: named values, and where each tensor lies.
//!
//! Numbers are little-endian. Lengths come from the file, so nothing is allocated for more than
//! the file can hold.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::path::Path;

use super::super::{Geometry, RopeConfig, RopeScaling, RopeStyle};
use super::{Architecture, ModelFile, ModelFormat, unread};

/// The first four bytes.
pub const MAGIC: &[u8; 4] = b"GGUF";

/// How deep lists of lists may be.
const MAX_DEPTH: u32 = 4;

/// The most values in all lists together: real files have some two million, for the vocabulary and
/// its merges. A value takes 32 times the memory that a byte of a list takes in the file.
const MAX_VALUES: u64 = 1 << 24;
/// The longest text, in bytes.
const MAX_TEXT_BYTES: usize = 1 << 24;
/// The longest header, in bytes: a file of holes can be as long as it likes to.
const MAX_HEADER_BYTES: u64 = 1 << 28;

/// A named value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A whole number, negative or not.
    Int(i64),
    /// A whole number of 64 bits.
    Uint(u64),
    /// A number with a fraction.
    Float(f64),
    /// Yes or no.
    Bool(bool),
    /// A text.
    Text(String),
    /// A list of values of one type.
    List(Vec<Value>),
}

impl fmt::Display for Value {
    /// As an error tells of it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(number) => write!(f, "{number}"),
            Self::Uint(number) => write!(f, "{number}"),
            Self::Float(number) => write!(f, "the float {number:?}"),
            Self::Bool(flag) => write!(f, "{flag}"),
            Self::Text(_) => f.write_str("a text"),
            Self::List(_) => f.write_str("a list"),
        }
    }
}

/// Where a tensor lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Sizes, the one whose elements lie side by side first.
    pub shape: Vec<u64>,
    /// GGUF's number of its element type.
    pub kind: u32,
    /// Its first byte, from the beginning of the file.
    pub offset: u64,
}

/// Everything before the tensors' bytes.
#[derive(Clone, Debug)]
pub struct Header {
    /// By name.
    pub values: BTreeMap<String, Value>,
    /// By name.
    pub tensors: BTreeMap<String, Tensor>,
}

/// Reads numbers and texts, and knows how much of the file is left.
struct Reader<'a> {
    from: &'a mut dyn Read,
    read: u64,
    file_bytes: u64,
    /// Values of lists so far.
    values: u64,
}

impl Reader<'_> {
    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), String> {
        self.read += bytes.len() as u64;
        if self.read > MAX_HEADER_BYTES {
            return Err(format!("its header is longer than {MAX_HEADER_BYTES} bytes"));
        }
        let read = self.from.read_exact(bytes);
        read.map_err(|error| unread(&error, "its header is cut off; get the file again"))
    }

    fn u32(&mut self) -> Result<u32, String> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, String> {
        self.bytes().map(u64::from_le_bytes)
    }

    /// How many of something there are, of which each takes so many bytes at least.
    fn count(&mut self, least_bytes: u64) -> Result<usize, String> {
        let count = self.u64()?;
        let left = self.file_bytes.saturating_sub(self.read);
        if count.checked_mul(least_bytes).is_none_or(|bytes| bytes > left) {
            return Err(format!("its header is damaged: {count} entries in {left} bytes"));
        }
        usize::try_from(count).map_err(|error| error.to_string())
    }

    fn text(&mut self) -> Result<String, String> {
        let len = self.count(1)?;
        if len > MAX_TEXT_BYTES {
            return Err(format!("its header is damaged: a text of {len} bytes"));
        }
        let mut bytes = vec![0; len];
        self.fill(&mut bytes)?;
        String::from_utf8(bytes)
            .map_err(|_| "its header is damaged: a text not in UTF-8".to_owned())
    }

    fn value(&mut self, kind: u32, depth: u32) -> Result<Value, String> {
        Ok(match kind {
            0 => Value::Int(self.bytes::<1>()?[0].into()),
            1 => Value::Int(i8::from_le_bytes(self.bytes()?).into()),
            2 => Value::Int(u16::from_le_bytes(self.bytes()?).into()),
            3 => Value::Int(i16::from_le_bytes(self.bytes()?).into()),
            4 => Value::Int(self.u32()?.into()),
            5 => Value::Int(i32::from_le_bytes(self.bytes()?).into()),
            6 => Value::Float(f32::from_le_bytes(self.bytes()?).into()),
            7 => Value::Bool(self.bytes::<1>()?[0] != 0),
            8 => Value::Text(self.text()?),
            9 if depth < MAX_DEPTH => {
                let kind = self.u32()?;
                let count = self.count(1)?;
                self.values += count as u64;
                if self.values > MAX_VALUES {
                    return Err(format!("its header has more than {MAX_VALUES} values in lists"));
                }
                let mut list = Vec::new();
                for _ in 0..count {
                    list.push(self.value(kind, depth + 1)?);
                }
                Value::List(list)
            }
            10 => Value::Uint(self.u64()?),
            11 => Value::Int(i64::from_le_bytes(self.bytes()?)),
            12 => Value::Float(f64::from_le_bytes(self.bytes()?)),
            other => return Err(format!("its header is damaged: a value of type {other}")),
        })
    }
}

impl Header {
    /// Reads what follows the first four bytes of a file of so many.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn read_after_magic(from: &mut dyn Read, file_bytes: u64) -> Result<Self, String> {
        let mut reader = Reader { from, read: 4, file_bytes, values: 0 };
        let version = reader.u32()?;
        if !(2..=3).contains(&version) {
            return Err(format!("it is GGUF of version {version}; expected version 2 or 3"));
        }
        let num_tensors = reader.count(24)?;
        let num_values = reader.count(12)?;
        let mut values = BTreeMap::new();
        for _ in 0..num_values {
            let name = reader.text()?;
            let kind = reader.u32()?;
            values.insert(name, reader.value(kind, 0)?);
        }
        let mut tensors = BTreeMap::new();
        for _ in 0..num_tensors {
            let name = reader.text()?;
            let dims = reader.u32()?;
            if dims > 8 {
                return Err(format!("its header is damaged: {name:?} has {dims} dimensions"));
            }
            let mut shape = Vec::new();
            for _ in 0..dims {
                shape.push(reader.u64()?);
            }
            let (kind, offset) = (reader.u32()?, reader.u64()?);
            tensors.insert(name, Tensor { shape, kind, offset });
        }
        let mut header = Self { values, tensors };
        let alignment = header.whole("general.alignment")?.unwrap_or(32).max(1);
        let start = reader.read.next_multiple_of(alignment.into());
        for tensor in header.tensors.values_mut() {
            tensor.offset = tensor.offset.saturating_add(start);
        }
        Ok(header)
    }

    /// A whole number that is not negative.
    #[must_use]
    pub fn int(&self, key: &str) -> Option<u64> {
        match self.values.get(key)? {
            Value::Int(number) => u64::try_from(*number).ok(),
            Value::Uint(number) => Some(*number),
            _ => None,
        }
    }

    /// A number.
    #[must_use]
    pub fn float(&self, key: &str) -> Option<f64> {
        match self.values.get(key)? {
            Value::Float(number) => Some(*number),
            _ => None,
        }
    }

    /// A text.
    #[must_use]
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.values.get(key)? {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// A list.
    #[must_use]
    pub fn list(&self, key: &str) -> Option<&[Value]> {
        match self.values.get(key)? {
            Value::List(list) => Some(list),
            _ => None,
        }
    }
}

/// Values that may be left out. One that is there and is of no use is an error: what is taken where
/// it is absent would be another model.
impl Header {
    fn optional<T>(
        &self,
        key: &str,
        found: Option<T>,
        expected: &str,
    ) -> Result<Option<T>, String> {
        match self.values.get(key) {
            Some(value) if found.is_none() => {
                Err(format!("its {key:?} is {value}; expected {expected}"))
            }
            _ => Ok(found),
        }
    }

    /// A whole number of 32 bits that is not negative.
    ///
    /// # Errors
    /// There is something else.
    pub fn whole(&self, key: &str) -> Result<Option<u32>, String> {
        let number = self.int(key).and_then(|number| u32::try_from(number).ok());
        self.optional(key, number, "a whole number of 32 bits, 0 or more")
    }

    fn fraction(&self, key: &str) -> Result<Option<f64>, String> {
        self.optional(key, self.float(key), "a float")
    }

    /// A text.
    ///
    /// # Errors
    /// There is something else.
    pub fn word(&self, key: &str) -> Result<Option<&str>, String> {
        self.optional(key, self.text(key), "a text")
    }

    /// Yes or no.
    ///
    /// # Errors
    /// There is something else.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, String> {
        let flag = match self.values.get(key) {
            Some(Value::Bool(flag)) => Some(*flag),
            _ => None,
        };
        self.optional(key, flag, "true or false")
    }
}

/// What the header says of the model.
pub(super) fn describe(path: &Path, header: &Header) -> Result<ModelFile, String> {
    let name = header.text("general.architecture").unwrap_or_default();
    let architecture = match name {
        "llama" => Architecture::Llama,
        "gemma3" => Architecture::Gemma3,
        other => {
            return Err(format!(
                "it is a model of the architecture {other:?}; expected \"llama\" or \"gemma3\""
            ));
        }
    };
    let optional = |key: &str| header.whole(&format!("{name}.{key}"));
    let number = |key: &str| -> Result<u32, String> {
        optional(key)?.ok_or_else(|| format!("it has no number \"{name}.{key}\""))
    };
    if optional("expert_count")?.is_some_and(|experts| experts > 0) {
        return Err("it is a mixture of experts, which this engine does not compute".to_owned());
    }
    let (dim, num_q_heads) = (number("embedding_length")?, number("attention.head_count")?);
    let num_kv_heads = optional("attention.head_count_kv")?.unwrap_or(num_q_heads);
    let head_dim = optional("attention.key_length")?.unwrap_or(dim / num_q_heads.max(1));
    let windows = match architecture {
        Architecture::Llama => vec![0],
        // Every sixth layer sees everything.
        Architecture::Gemma3 => {
            let window = number("attention.sliding_window")?;
            vec![window, window, window, window, window, 0]
        }
    };
    let geometry = Geometry::checked(
        [number("block_count")?, num_q_heads, num_kv_heads, head_dim],
        &windows,
        0,
    )
    .map_err(|(_, problem)| problem)?;
    let embedding = header.tensors.get("token_embd.weight").ok_or("it has no token embedding")?;
    let vocab_size = embedding.shape.get(1).and_then(|size| u32::try_from(*size).ok());
    let eps = header.fraction(&format!("{name}.attention.layer_norm_rms_epsilon"))?;
    #[expect(clippy::cast_possible_truncation, reason = "the nearest f32")]
    let norm_eps = eps.unwrap_or(1e-5) as f32;
    Ok(ModelFile {
        path: path.to_owned(),
        format: ModelFormat::Gguf,
        architecture,
        rope: rope(header, name, architecture, &geometry)?,
        geometry,
        dim,
        hidden_dim: number("feed_forward_length")?,
        vocab_size: vocab_size.ok_or("its token embedding is no matrix")?,
        context_len: number("context_length")?,
        norm_eps,
        has_output: header.tensors.contains_key("output.weight"),
    })
}

/// How the model rotates.
fn rope(
    header: &Header,
    name: &str,
    architecture: Architecture,
    geometry: &Geometry,
) -> Result<RopeConfig, String> {
    if header.tensors.contains_key("rope_freqs.weight") {
        return Err(
            "it has a list of factors for its frequencies, which is not supported".to_owned()
        );
    }
    let key = |key: &str| format!("{name}.rope.{key}");
    // The old name of the factor; of both, 0 says that there is none.
    let factor = match header.fraction(&key("scaling.factor"))? {
        None => header.fraction(&key("scale_linear"))?,
        factor => factor,
    };
    let factor = factor.filter(|factor| *factor != 0.0);
    let scaling = match header.word(&key("scaling.type"))? {
        Some("none") => None,
        // A factor alone is one of this kind.
        None => factor.map(|factor| RopeScaling::Linear { factor }),
        Some("linear") => {
            Some(RopeScaling::Linear { factor: factor.ok_or("it has no factor of its scaling")? })
        }
        Some(other) => return Err(format!("it scales its frequencies by {other:?}")),
    };
    let dims = header.whole(&key("dimension_count"))?;
    let theta = header.fraction(&key("freq_base"))?;
    let window_theta = header.fraction(&key("freq_base_swa"))?;
    Ok(RopeConfig {
        theta: Some(theta.unwrap_or(10_000.0)),
        dims: dims.filter(|dims| *dims != geometry.head_dim && architecture == Architecture::Llama),
        style: match architecture {
            Architecture::Llama => RopeStyle::Pairs,
            Architecture::Gemma3 => RopeStyle::Halves,
        },
        scaling,
        window_theta: (architecture == Architecture::Gemma3)
            .then(|| window_theta.unwrap_or(10_000.0)),
    })
}

#[cfg(test)]
mod tests {
    use super::super::super::trickle::Trickle;
    use super::*;

    fn text(text: &str) -> Vec<u8> {
        [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
    }

    fn file(values: &[Vec<u8>], count: u64) -> Vec<u8> {
        let numbers =
            [&3_u32.to_le_bytes()[..], &0_u64.to_le_bytes(), &count.to_le_bytes()].concat();
        [numbers, values.concat()].concat()
    }

    fn read(bytes: &[u8]) -> Result<Header, String> {
        Header::read_after_magic(&mut &bytes[..], bytes.len() as u64 + 4)
    }

    /// A value of each kind.
    fn values() -> Vec<u8> {
        file(
            &[
                text("a"),
                8_u32.to_le_bytes().to_vec(),
                text("b"),
                text("c"),
                9_u32.to_le_bytes().to_vec(),
                4_u32.to_le_bytes().to_vec(),
                2_u64.to_le_bytes().to_vec(),
                7_u32.to_le_bytes().to_vec(),
                9_u32.to_le_bytes().to_vec(),
                text("d"),
                6_u32.to_le_bytes().to_vec(),
                0.5_f32.to_le_bytes().to_vec(),
                text("e"),
                7_u32.to_le_bytes().to_vec(),
                vec![1],
            ],
            4,
        )
    }

    #[test]
    fn values_of_all_kinds_are_read() {
        let bytes = values();
        let header = read(&bytes).unwrap();
        assert_eq!(header.text("a"), Some("b"));
        assert_eq!(header.list("c"), Some(&[Value::Int(7), Value::Int(9)][..]));
        assert_eq!((header.float("d"), header.flag("e")), (Some(0.5), Ok(Some(true))));
        assert_eq!((header.int("a"), header.int("f")), (None, None));
        for cut in 0..bytes.len() {
            assert!(read(&bytes[..cut]).is_err(), "cut at {cut}");
        }
    }

    /// Readings that take a byte, that a signal interrupts, that fail, or where the file was cut
    /// off meanwhile.
    #[test]
    fn edge_61_readings_that_are_short_or_fail() {
        let bytes = values();
        let whole = read(&bytes).unwrap();
        let all = bytes.len() as u64 + 4;
        let slow = Header::read_after_magic(&mut Trickle::new(&bytes), all).unwrap();
        assert_eq!((slow.values, slow.tensors), (whole.values, whole.tensors));
        let eio = std::io::Error::from_raw_os_error(5).to_string();
        for at in 0..bytes.len() {
            let failing = &mut Trickle::failing(&bytes, at);
            assert_eq!(Header::read_after_magic(failing, all).unwrap_err(), eio, "byte {at}");
            let cut = Header::read_after_magic(&mut &bytes[..at], all).unwrap_err();
            assert!(cut.contains("cut off"), "byte {at}: {cut}");
        }
    }

    #[test]
    fn lengths_beyond_the_file_are_refused_before_anything_is_allocated() {
        let long_text = [&u64::MAX.to_le_bytes()[..], b"a"].concat();
        assert!(read(&file(&[long_text], 1)).unwrap_err().contains("entries in"));
        assert!(read(&file(&[], u64::MAX / 2)).unwrap_err().contains("entries in"));
        // A list that the file could hold, and that would take half a gigabyte.
        let list = [
            text("a"),
            9_u32.to_le_bytes().to_vec(),
            0_u32.to_le_bytes().to_vec(),
            (MAX_VALUES + 1).to_le_bytes().to_vec(),
        ];
        let bytes = file(&list, 1);
        let error = Header::read_after_magic(&mut &bytes[..], u64::MAX).unwrap_err();
        assert!(error.contains("values in lists"), "{error}");
        // A text that a file of holes could hold.
        let long = [&(1_u64 << 44).to_le_bytes()[..], b"a"].concat();
        let bytes = file(&[long], 1);
        let error = Header::read_after_magic(&mut &bytes[..], u64::MAX).unwrap_err();
        assert!(error.contains("a text of"), "{error}");
        // And a header of many that are long enough.
        let [most, kind] = [MAX_TEXT_BYTES as u64, 8].map(u64::to_le_bytes);
        let list = [&text("a")[..], &9_u32.to_le_bytes(), &kind[..4], &100_u64.to_le_bytes()];
        let element = [&most[..], &vec![b'a'; MAX_TEXT_BYTES]].concat();
        let start = file(&[list.concat()], 1);
        let mut endless: Box<dyn Read> = Box::new(&start[..]);
        for _ in 0..20 {
            endless = Box::new(endless.chain(&element[..]));
        }
        let error = Header::read_after_magic(&mut endless, u64::MAX).unwrap_err();
        assert!(error.contains("is longer than"), "{error}");
    }

    /// A model, of which these values are others, or there too.
    fn described(others: &[(&str, Value)]) -> Result<ModelFile, String> {
        let mut values: BTreeMap<String, Value> = [
            ("block_count", 2),
            ("embedding_length", 64),
            ("attention.head_count", 8),
            ("attention.head_count_kv", 2),
            ("feed_forward_length", 128),
            ("context_length", 256),
        ]
        .map(|(key, number)| (format!("llama.{key}"), Value::Int(number)))
        .into();
        values.insert("general.architecture".to_owned(), Value::Text("llama".to_owned()));
        for (key, value) in others {
            values.insert(format!("llama.{key}"), value.clone());
        }
        let embedding = Tensor { shape: vec![64, 100], kind: 0, offset: 0 };
        let tensors = [("token_embd.weight".to_owned(), embedding)].into();
        describe(Path::new("model.gguf"), &Header { values, tensors })
    }

    /// Where a value cannot be used, another model would be planned than the file's.
    #[test]
    fn what_is_there_and_of_no_use_is_no_default() {
        let plain = described(&[]).unwrap();
        assert_eq!((plain.geometry.num_kv_heads, plain.geometry.head_dim), (2, 8));
        let per_layer = Value::List(vec![Value::Int(2), Value::Int(4)]);
        let word = Value::Text("8".to_owned());
        let big = Value::Uint(1 << 32);
        for (key, values) in [
            (
                "attention.head_count_kv",
                vec![per_layer.clone(), big.clone(), word.clone(), Value::Int(-1)],
            ),
            ("attention.key_length", vec![per_layer, big.clone(), Value::Float(8.0)]),
            ("expert_count", vec![Value::Float(8.0)]),
            ("attention.layer_norm_rms_epsilon", vec![Value::Int(1)]),
            ("rope.dimension_count", vec![Value::Float(4.0), word.clone(), big]),
            ("rope.freq_base", vec![Value::Int(10_000), word.clone()]),
            ("rope.freq_base_swa", vec![Value::Uint(10_000)]),
            ("rope.scaling.factor", vec![Value::Int(2), word.clone()]),
            ("rope.scale_linear", vec![Value::Int(2), word]),
            ("rope.scaling.type", vec![Value::Int(1)]),
        ] {
            for value in values {
                let error = described(&[(key, value.clone())]).unwrap_err();
                let start = format!("its \"llama.{key}\" is {value}; expected a ");
                assert!(error.starts_with(&start), "{error}");
            }
        }
    }

    #[test]
    fn a_factor_alone_is_a_linear_one_and_so_is_that_of_the_old_key() {
        let scaling = |others: &[(&str, f64)], kind: Option<&str>| {
            let mut others: Vec<(&str, Value)> =
                others.iter().map(|(key, factor)| (*key, Value::Float(*factor))).collect();
            others.extend(kind.map(|kind| ("rope.scaling.type", Value::Text(kind.to_owned()))));
            described(&others).map(|file| file.rope.scaling)
        };
        let (new, old) = ("rope.scaling.factor", "rope.scale_linear");
        let by = |factor| Ok(Some(RopeScaling::Linear { factor }));
        for kind in [None, Some("linear")] {
            assert_eq!(scaling(&[(new, 4.0)], kind), by(4.0));
            assert_eq!(scaling(&[(old, 4.0)], kind), by(4.0));
            assert_eq!(scaling(&[(new, 2.0), (old, 4.0)], kind), by(2.0));
            assert_eq!(scaling(&[(new, 2.0), (old, 4.0)], Some("none")), Ok(None));
        }
        assert_eq!(scaling(&[(new, 0.0)], None), Ok(None));
        assert_eq!(scaling(&[], None), Ok(None));
        assert!(
            scaling(&[], Some("linear")).is_err() && scaling(&[(new, 2.0)], Some("yarn")).is_err()
        );
    }
}
