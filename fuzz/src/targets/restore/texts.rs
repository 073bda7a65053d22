//! The texts, and what K and V of their tokens are: a cache computes these, a file of records has
//! them, and what is restored is held against them.

use kvpool::plan::Kv;

pub(super) const HEAD_DIM: usize = 8;

/// The token at a position of one of three texts, which part ways after 20 tokens.
pub(super) fn token(text: u8, position: u32) -> u32 {
    (position * 7 + u32::from(text % 3) * (position / 20)) % 5
}

pub(super) fn text(text: u8, len: u32) -> Vec<u32> {
    (0..len).map(|position| token(text, position)).collect()
}

/// What K and V of a token are, in each of their elements.
pub(super) fn stored(kv: Kv, position: u32, token: u32) -> f32 {
    let number = match kv {
        Kv::K => position,
        Kv::V => token + 64,
    };
    f32::from(u16::try_from(number).expect("small"))
}
