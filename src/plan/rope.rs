//! Rotary position encoding: the angles of every position, and the tables that devices keep of
//! their cosines and sines.

use serde::Serialize;

use crate::config::{Config, Geometry, RopeConfig, RopeScaling, RopeStyle};
use crate::units::{Bytes, Overflow};

/// How K is rotated before it is stored.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rope {
    /// Which elements are a pair.
    pub style: RopeStyle,
    /// Elements that are rotated, from the first on.
    pub dims: u32,
    /// Positions that there are angles for: `limits.max_seq_len`.
    pub positions: u32,
    /// For layers that see everything, and, where it differs, for layers with a window.
    pub tables: Vec<RopeTable>,
}

/// The angles of some layers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RopeTable {
    /// What pair `i` turns by from one position to the next, in radians. `[dims / 2]`
    pub frequencies: Vec<f64>,
    /// Factor on cosines and sines: 1 but for YaRN.
    pub factor: f64,
}

impl RopeTable {
    /// The cosine and the sine that pair `pair` is rotated with at a position.
    #[must_use]
    pub fn cos_sin(&self, position: u32, pair: u32) -> (f32, f32) {
        let angle = f64::from(position) * self.frequencies[pair as usize];
        #[expect(clippy::cast_possible_truncation, reason = "the nearest f32")]
        let narrow = |x: f64| (x * self.factor) as f32;
        (narrow(angle.cos()), narrow(angle.sin()))
    }
}

impl Rope {
    /// The rotation of a checked configuration; `None` where it has none.
    pub(super) fn new(config: &Config, geometry: &Geometry) -> Option<Self> {
        let rope = config.rope.as_ref()?.resolved(&config.model);
        Self::of(&rope, geometry, config.limits.max_seq_len)
    }

    /// The rotation of settings that were checked, for so many positions; `None` where they name no
    /// base.
    #[must_use]
    pub fn of(rope: &RopeConfig, geometry: &Geometry, positions: u32) -> Option<Self> {
        let dims = rope.dims.unwrap_or(geometry.head_dim);
        let mut tables = vec![table(rope.theta?, dims, rope.scaling.as_ref())];
        if let Some(theta) = rope.window_theta {
            tables.push(table(theta, dims, None));
        }
        Some(Self { style: rope.style, dims, positions, tables })
    }

    /// Which table a layer uses.
    #[must_use]
    pub fn table_of(&self, windowed: bool) -> u32 {
        u32::from(windowed && self.tables.len() > 1)
    }

    /// f32 numbers of all tables. `[tables, (cos, sin), positions, dims / 2]`
    ///
    /// # Errors
    /// [`Overflow`] when it does not fit in 64 bits.
    pub fn numbers(&self) -> Result<u64, Overflow> {
        let rows = Bytes(2 * self.tables.len() as u64).try_mul(self.positions.into())?;
        Ok(rows.try_mul(u64::from(self.dims / 2))?.get())
    }

    /// Writes all tables. `out`: `[tables, (cos, sin), positions, dims / 2]`
    pub fn fill(&self, out: &mut [f32]) {
        let half = self.dims / 2;
        let len = self.positions as usize * half as usize;
        for (table, out) in self.tables.iter().zip(out.chunks_exact_mut(2 * len)) {
            let (cos, sin) = out.split_at_mut(len);
            let places = (0..self.positions).flat_map(|at| (0..half).map(move |pair| (at, pair)));
            for ((position, pair), (cos, sin)) in places.zip(cos.iter_mut().zip(sin)) {
                (*cos, *sin) = table.cos_sin(position, pair);
            }
        }
    }

    /// Rotates the vectors of one position as K is rotated on its way into the cache, bit for bit:
    /// for queries that lie in host memory. `table`:
    /// [`Plan::rope_table_of`](super::Plan::rope_table_of); `x`: `[heads, head_dim]`
    pub fn rotate(&self, table: u32, position: u32, head_dim: u32, x: &mut [f32]) {
        let table = &self.tables[table as usize];
        for pair in 0..self.dims / 2 {
            let (cos, sin) = table.cos_sin(position, pair);
            let (a, b) = self.pair(pair as usize);
            for x in x.chunks_exact_mut(head_dim as usize) {
                (x[a], x[b]) = rotated(x[a], x[b], cos, sin);
            }
        }
    }

    /// The two elements of a pair.
    #[inline(always)]
    #[must_use]
    pub fn pair(&self, pair: usize) -> (usize, usize) {
        match self.style {
            RopeStyle::Halves => (pair, pair + self.dims as usize / 2),
            RopeStyle::Pairs => (2 * pair, 2 * pair + 1),
        }
    }
}

/// One pair, rotated: the operations that every device does, in this order.
#[inline(always)]
#[must_use]
pub fn rotated(a: f32, b: f32, cos: f32, sin: f32) -> (f32, f32) {
    (a.mul_add(cos, -(b * sin)), a.mul_add(sin, b * cos))
}

/// The angles of a base.
fn table(theta: f64, dims: u32, scaling: Option<&RopeScaling>) -> RopeTable {
    let dims = f64::from(dims);
    let half = dims / 2.0;
    let plain = |pair: f64| theta.powf(-pair / half);
    let pairs = (0..).map(f64::from).take_while(|pair| *pair < half);
    match scaling {
        None => RopeTable { frequencies: pairs.map(plain).collect(), factor: 1.0 },
        Some(RopeScaling::Linear { factor }) => {
            RopeTable { frequencies: pairs.map(|i| plain(i) / factor).collect(), factor: 1.0 }
        }
        Some(RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position,
        }) => {
            let trained = f64::from(*original_max_position);
            let scaled = |pair: f64| {
                let frequency = plain(pair);
                let turns = trained * frequency / std::f64::consts::TAU;
                // 0 for long waves, 1 for short ones.
                let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let smooth = smooth.clamp(0.0, 1.0);
                frequency / factor * (1.0 - smooth) + frequency * smooth
            };
            RopeTable { frequencies: pairs.map(scaled).collect(), factor: 1.0 }
        }
        Some(RopeScaling::Yarn {
            factor,
            original_max_position,
            beta_fast,
            beta_slow,
            truncate,
        }) => {
            let trained = f64::from(*original_max_position);
            // The pair that turns so often within the trained context.
            let turning = |turns: &f64| {
                dims * (trained / (turns * std::f64::consts::TAU)).ln() / (2.0 * theta.ln())
            };
            let (mut low, mut high) = (turning(beta_fast), turning(beta_slow));
            if *truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            (low, high) = (low.max(0.0), high.min(dims - 1.0));
            let width = if high > low { high - low } else { 0.001 };
            let scaled = |pair: f64| {
                let divided = ((pair - low) / width).clamp(0.0, 1.0);
                plain(pair) / factor * divided + plain(pair) * (1.0 - divided)
            };
            let factor_of_length = 0.1 * factor.ln() + 1.0;
            RopeTable { frequencies: pairs.map(scaled).collect(), factor: factor_of_length }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_are_those_of_the_formulas() {
        let near = |a: f64, b: f64| assert!((a - b).abs() <= 1e-12 * b.abs(), "{a}, {b}");
        let plain = table(1e4, 128, None);
        assert_eq!((plain.frequencies.len(), plain.factor), (64, 1.0));
        near(plain.frequencies[0], 1.0);
        near(plain.frequencies[32], 0.01);
        let linear = table(1e4, 128, Some(&RopeScaling::Linear { factor: 8.0 }));
        near(linear.frequencies[32], 0.01 / 8.0);
        let llama3 = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position: 8192,
        };
        let (base, scaled) = (table(5e5, 128, None), table(5e5, 128, Some(&llama3)));
        for (base, scaled) in base.frequencies.iter().zip(&scaled.frequencies) {
            let wave = std::f64::consts::TAU / base;
            if wave < 2048.0 {
                near(*scaled, *base);
            } else if wave > 8192.0 {
                near(*scaled, base / 8.0);
            } else {
                assert!(base / 8.0 < *scaled && scaled < base);
            }
        }
        let yarn = RopeScaling::Yarn {
            factor: 32.0,
            original_max_position: 4096,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: false,
        };
        let (base, scaled) = (table(150_000.0, 64, None), table(150_000.0, 64, Some(&yarn)));
        near(scaled.factor, 1.346_573_590_279_972_7);
        for (base, scaled) in base.frequencies.iter().zip(&scaled.frequencies) {
            let turns = 4096.0 * base / std::f64::consts::TAU;
            if turns > 32.0 {
                near(*scaled, *base);
            } else if turns < 1.0 {
                near(*scaled, base / 32.0);
            } else {
                assert!(base / 32.0 <= *scaled && scaled <= base);
            }
        }
    }

    /// Some frequencies as Hugging Face's `transformers` 5.24.0 computes them, in f32.
    #[test]
    fn frequencies_are_those_of_transformers() {
        let llama3 = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position: 8192,
        };
        let yarn = RopeScaling::Yarn {
            factor: 32.0,
            original_max_position: 4096,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: false,
        };
        let of_llama3 = [
            (0, 1.0),
            (20, 0.016_560_441),
            (30, 0.001_371_893_7),
            (33, 0.000_312_693_65),
            (40, 3.428_102_4e-5),
            (63, 3.068_925_9e-7),
        ];
        let of_yarn = [
            (0, 1.0),
            (8, 0.050_813_273),
            (10, 0.019_335),
            (14, 0.002_093_792_7),
            (18, 3.830_881_2e-5),
            (31, 3.023_511_4e-7),
        ];
        for (table, known) in [
            (table(5e5, 128, Some(&llama3)), of_llama3),
            (table(150_000.0, 64, Some(&yarn)), of_yarn),
        ] {
            for (pair, want) in known {
                let got: f64 = table.frequencies[pair];
                assert!((got / want - 1.0).abs() < 1e-6, "pair {pair}: {got}, {want}");
            }
        }
    }

    #[test]
    fn a_rotation_keeps_lengths_and_turns_by_the_angle() {
        let tables = vec![table(1e4, 16, None)];
        for style in [RopeStyle::Halves, RopeStyle::Pairs] {
            let rope = Rope { style, dims: 16, positions: 100, tables: tables.clone() };
            let mut x = [0.0_f32; 24];
            for pair in 0..8 {
                let (a, b) = rope.pair(pair);
                (x[a], x[b]) = (3.0, 4.0);
            }
            (x[16], x[23]) = (5.0, 6.0);
            rope.rotate(0, 99, 24, &mut x);
            for pair in 0..8 {
                let (a, b) = rope.pair(pair);
                let (a, b) = (f64::from(x[a]), f64::from(x[b]));
                assert!((a.hypot(b) - 5.0).abs() < 1e-5);
                let angle = 99.0 * tables[0].frequencies[pair];
                let want = 3.0 * angle.cos() - 4.0 * angle.sin();
                assert!((a - want).abs() < 1e-5, "{style:?}, pair {pair}: {a}, {want}");
            }
            assert_eq!((x[16], x[23]), (5.0, 6.0), "beyond dims nothing is touched");
            assert_eq!(rope.numbers(), Ok(1600));
            let mut all = vec![0.0; 1600];
            rope.fill(&mut all);
            assert_eq!((all[99 * 8 + 3], all[800 + 99 * 8 + 3]), rope.tables[0].cos_sin(99, 3));
        }
    }
}
