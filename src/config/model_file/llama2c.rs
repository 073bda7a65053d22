//! llama2.c's legacy export: seven 32-bit numbers, then f32 weights.

use std::io::Read;
use std::path::Path;

use super::super::{Geometry, RopeConfig, RopeStyle};
use super::{Architecture, ModelFile, ModelFormat, unread};

/// Bytes before the weights.
pub const HEADER_BYTES: usize = 28;

/// What the numbers stand for, in their order.
const NAMES: [&str; 7] =
    ["dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len"];

/// Reads the header, of which the first four bytes are read already.
pub(super) fn describe(
    path: &Path,
    first: [u8; 4],
    rest: &mut dyn Read,
    file_bytes: u64,
) -> Result<ModelFile, String> {
    let unknown =
        |why: String| format!("it is neither a GGUF file nor a legacy export of llama2.c: {why}");
    let mut numbers = [i32::from_le_bytes(first), 0, 0, 0, 0, 0, 0];
    for number in &mut numbers[1..] {
        let mut bytes = [0; 4];
        let read = rest.read_exact(&mut bytes);
        read.map_err(|error| unread(&error, &unknown("it is too short".to_owned())))?;
        *number = i32::from_le_bytes(bytes);
    }
    let mut sizes = [0_u32; 7];
    for ((size, number), name) in sizes.iter_mut().zip(numbers).zip(NAMES) {
        // A negative vocabulary says that the output matrix is a tensor of its own.
        let number =
            if name == "vocab_size" { number.unsigned_abs() } else { number.cast_unsigned() };
        if !(1..=1 << 24).contains(&number) {
            return Err(unknown(format!("its {name} would be {number}")));
        }
        *size = number;
    }
    let [dim, hidden_dim, num_layers, num_q_heads, num_kv_heads, vocab_size, context_len] = sizes;
    if !dim.is_multiple_of(num_q_heads) {
        return Err(unknown(format!("its dim {dim} is no multiple of its {num_q_heads} heads")));
    }
    let numbers_of_model = [num_layers, num_q_heads, num_kv_heads, dim / num_q_heads];
    let geometry =
        Geometry::checked(numbers_of_model, &[0], 0).map_err(|(_, problem)| unknown(problem))?;
    let file = ModelFile {
        path: path.to_owned(),
        format: ModelFormat::Llama2C,
        architecture: Architecture::Llama,
        geometry,
        rope: RopeConfig {
            theta: Some(10_000.0),
            style: RopeStyle::Pairs,
            ..RopeConfig::default()
        },
        dim,
        hidden_dim,
        vocab_size,
        context_len,
        norm_eps: 1e-5,
        has_output: numbers[5] < 0,
    };
    let expected = HEADER_BYTES as u64 + 4 * weights(&file);
    if file_bytes != expected {
        return Err(unknown(format!("it would have {expected} bytes, and has {file_bytes}")));
    }
    Ok(file)
}

/// f32 numbers behind the header.
fn weights(file: &ModelFile) -> u64 {
    let of = |number: u32| u64::from(number);
    let (dim, hidden, head) = (of(file.dim), of(file.hidden_dim), of(file.geometry.head_dim));
    let kv = of(file.geometry.num_kv_heads) * head;
    // Two norms, q and output, k and v, three of the feed-forward part.
    let layer = 2 * dim + 2 * dim * dim + 2 * dim * kv + 3 * dim * hidden;
    // Embedding, last norm, the tables of cosines and sines that are not used any more, output.
    let embedding = of(file.vocab_size) * dim;
    let output = if file.has_output { embedding } else { 0 };
    embedding + of(file.geometry.num_layers) * layer + dim + of(file.context_len) * head + output
}

#[cfg(test)]
mod tests {
    use super::super::super::trickle::Trickle;
    use super::*;

    /// Readings that take a byte, that a signal interrupts, or that fail.
    #[test]
    fn edge_61_readings_that_are_short_or_fail() {
        // dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len
        let numbers = [16_i32, 24, 1, 2, 1, 10, 32].map(i32::to_le_bytes);
        let (first, rest) = (numbers[0], numbers[1..].concat());
        let layer = 2 * 16 + 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24;
        let bytes = 28 + 4 * (10 * 16 + layer + 16 + 32 * 8);
        let read = |from: &mut dyn Read| describe(Path::new("m"), first, from, bytes);
        let whole = read(&mut &rest[..]).unwrap();
        assert_eq!(read(&mut Trickle::new(&rest)).unwrap(), whole);
        for at in 0..rest.len() {
            let error = read(&mut Trickle::failing(&rest, at)).unwrap_err();
            let eio = std::io::Error::from_raw_os_error(5).to_string();
            assert_eq!(error, eio, "byte {at}");
            let error = read(&mut &rest[..at]).unwrap_err();
            assert!(error.ends_with("it is too short"), "byte {at}: {error}");
        }
    }
}
