//! `kvbm-logical` doing what `kvpool bench manager` does.

use std::hint::black_box;
use std::time::{Duration, Instant};

use dynamo_tokens::TokenBlockSequence;
use kvbm_logical::manager::{FrequencyTrackingCapacity, LineageEviction};
use kvbm_logical::{
    BlockManager, BlockRegistry, ImmutableBlock, KvbmSequenceHashProvider, SequenceHash,
};

use crate::counting::allocations;

/// As in kvpool's cases.
const TOKENS_PER_BLOCK: u32 = 16;
const POOL_BLOCKS: usize = 100_000;
const PROMPT_TOKENS: usize = 4096;
const SHUFFLED_BLOCKS: usize = 1024;

/// The tier that the blocks are said to be in.
#[derive(Clone)]
struct Tier;

type Manager = BlockManager<Tier>;
type Held = Vec<ImmutableBlock<Tier>>;

/// How a manager keeps the blocks that nobody holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Least recently used, and no count of how often blocks are used.
    Lru,
    /// The same with the counts that the crate's documentation builds its registry with.
    LruTracked,
    /// Four lists by frequency.
    MultiLru,
    /// Leaves of the lineage tree first, in the order in which they came.
    LineageFifo,
    /// A hash map, in the order in which blocks came.
    HashMap,
}

impl Backend {
    /// All of them: the fastest counts.
    pub const ALL: [Self; 5] =
        [Self::Lru, Self::LruTracked, Self::MultiLru, Self::LineageFifo, Self::HashMap];

    /// Its name in the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::LruTracked => "lru+tracker",
            Self::MultiLru => "multi-lru",
            Self::LineageFifo => "lineage-fifo",
            Self::HashMap => "hashmap",
        }
    }

    fn open(self) -> Manager {
        let tracker = FrequencyTrackingCapacity::Medium.create_tracker();
        let registry = BlockRegistry::builder();
        let registry = match self {
            Self::LruTracked | Self::MultiLru => registry.frequency_tracker(tracker),
            Self::Lru | Self::LineageFifo | Self::HashMap => registry,
        };
        let builder = Manager::builder()
            .block_count(POOL_BLOCKS)
            .block_size(TOKENS_PER_BLOCK as usize)
            .registry(registry.build());
        let builder = match self {
            Self::Lru | Self::LruTracked => builder.with_lru_backend(),
            Self::MultiLru => builder.with_multi_lru_backend(),
            Self::LineageFifo => builder.with_lineage_backend_eviction(LineageEviction::Fifo),
            Self::HashMap => builder.with_hashmap_backend(),
        };
        builder.build().expect("a valid configuration")
    }
}

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// So many blocks allocated, then dropped, in an empty pool.
    AllocFree(usize),
    /// 4,096 cached tokens: hashed, and the blocks matched.
    Hit,
    /// The blocks matched alone, with hashes that were computed before.
    HitHashed,
    /// 4,096 new tokens in a full pool: hashed, looked for, blocks allocated, staged, registered.
    Publish,
    /// The same without hashing and looking.
    PublishHashed,
    /// The blocks of 4,096 tokens dropped.
    Release,
}

/// What one turn measured.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    pub time: Duration,
    pub units: u64,
    pub allocations: u64,
}

impl Sample {
    fn add(&mut self, units: u64, work: impl FnOnce()) {
        let before = allocations();
        let start = Instant::now();
        work();
        self.time += start.elapsed();
        self.units += units;
        self.allocations += allocations() - before;
    }
}

/// A manager ready for one kind of work.
pub struct Peer {
    manager: Manager,
    work: Work,
    prompts: Vec<Vec<u32>>,
    hashes: Vec<Vec<SequenceHash>>,
    random: u64,
}

impl Peer {
    /// Opens it: full of cached blocks, unless only empty ones are wanted.
    pub fn open(backend: Backend, work: Work) -> Self {
        let mut peer = Self {
            manager: backend.open(),
            work,
            prompts: Vec::new(),
            hashes: Vec::new(),
            random: 1,
        };
        if !matches!(work, Work::AllocFree(_)) {
            peer.fill();
            peer.prompts = (0..16).map(|_| peer.prompt(PROMPT_TOKENS)).collect();
            peer.hashes = peer.prompts.iter().map(|prompt| hash(prompt)).collect();
            for hashes in &peer.hashes {
                drop(publish(&peer.manager, hashes));
            }
        }
        peer
    }

    fn number(&mut self) -> u32 {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 32) as u32
    }

    fn prompt(&mut self, len: usize) -> Vec<u32> {
        (0..len).map(|_| self.number() >> 15).collect()
    }

    /// Single blocks until the pool is full of them, dropped out of order.
    fn fill(&mut self) {
        let mut left = POOL_BLOCKS;
        while left > 0 {
            let now = left.min(SHUFFLED_BLOCKS);
            let mut held: Held = Vec::new();
            for _ in 0..now {
                let prompt = self.prompt(TOKENS_PER_BLOCK as usize);
                held.extend(publish(&self.manager, &hash(&prompt)));
            }
            while !held.is_empty() {
                let at = self.number() as usize % held.len();
                drop(held.swap_remove(at));
            }
            left -= now;
        }
    }

    /// Does its work some times over.
    pub fn turn(&mut self) -> Sample {
        let mut sum = Sample::default();
        match self.work {
            Work::AllocFree(blocks) => {
                let times = 16_384 / blocks;
                sum.add((times * blocks) as u64, || {
                    for _ in 0..times {
                        let held = self.manager.allocate_blocks(blocks).expect("free blocks");
                        drop(black_box(held));
                    }
                });
            }
            Work::Hit | Work::HitHashed | Work::Release => {
                self.pass(&mut Sample::default());
                for _ in 0..4 {
                    self.pass(&mut sum);
                }
            }
            Work::Publish | Work::PublishHashed => {
                for _ in 0..16 {
                    self.publish(&mut sum);
                }
            }
        }
        sum
    }

    /// One pass over the stored prompts.
    fn pass(&self, sum: &mut Sample) {
        let Self { manager, prompts, hashes, work, .. } = self;
        let mut held: Vec<Held> = Vec::with_capacity(prompts.len());
        let matching = |held: &mut Vec<Held>| {
            held.extend(hashes.iter().map(|hashes| manager.match_blocks(hashes)));
        };
        let units = prompts.len() as u64;
        match work {
            Work::Hit => sum.add(units, || {
                held.extend(prompts.iter().map(|prompt| manager.match_blocks(&hash(prompt))));
            }),
            Work::HitHashed => sum.add(units, || matching(&mut held)),
            _ => matching(&mut held),
        }
        for blocks in &held {
            assert_eq!(blocks.len(), PROMPT_TOKENS / TOKENS_PER_BLOCK as usize);
        }
        if *work == Work::Release {
            sum.add(units, || held.drain(..).for_each(drop));
        }
    }

    /// One new prompt.
    fn publish(&mut self, sum: &mut Sample) {
        let prompt = self.prompt(PROMPT_TOKENS);
        let blocks = PROMPT_TOKENS / TOKENS_PER_BLOCK as usize;
        let manager = &self.manager;
        let mut held = Held::new();
        if self.work == Work::Publish {
            sum.add(blocks as u64, || {
                let hashes = hash(&prompt);
                assert!(manager.match_blocks(&hashes).is_empty());
                held = publish(manager, &hashes);
            });
        } else {
            let hashes = hash(&prompt);
            sum.add(blocks as u64, || held = publish(manager, &hashes));
        }
        assert_eq!(held.len(), blocks);
        assert_eq!(manager.available_blocks(), POOL_BLOCKS - blocks);
    }
}

/// The hashes of a prompt's full blocks.
fn hash(prompt: &[u32]) -> Vec<SequenceHash> {
    let sequence = TokenBlockSequence::from_slice(prompt, TOKENS_PER_BLOCK, None);
    sequence.blocks().iter().map(KvbmSequenceHashProvider::kvbm_sequence_hash).collect()
}

/// Blocks for these hashes, registered.
fn publish(manager: &Manager, hashes: &[SequenceHash]) -> Held {
    let blocks = manager.allocate_blocks(hashes.len()).expect("blocks that can be evicted");
    let staged = blocks.into_iter().zip(hashes).map(|(block, hash)| {
        block.stage(*hash, TOKENS_PER_BLOCK as usize).unwrap_or_else(|_| panic!("the same size"))
    });
    manager.register_blocks(staged.collect())
}
