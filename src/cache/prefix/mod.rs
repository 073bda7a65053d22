//! The prefix index: which blocks hold which tokens, for sequences that begin alike.
//!
//! **What is indexed.** Blocks of the *lead* group, the paged layers without a window, which every
//! sequence holds from its first token to its last. A block is published when it is full and
//! committed; its key is its parent (the block before it), its namespace where one begins, and its
//! tokens. So a node stands for one exact prefix, and equal prefixes are the same chain of nodes.
//! Blocks of windowed paged groups are *attached* to the lead's block with the same tokens; they
//! may be evicted earlier, and a match reaches only as far as every group has what it needs.
//!
//! **A hit is proved.** The hash only picks the place to look. The parent, the namespace and all
//! tokens are compared on every hit (P7), also for the block that matches in part.
//!
//! **Shape.** Flat tables of a size that the plan knows (`plan/host.rs`): a node and the tokens of
//! each block, an open-addressed table twice as large as needed. Nothing allocates.
//!
//! **Invariants.** A published block's parent is published. A block that is held has a parent that
//! is held. A cached block's children are cached and go first (see `pool/lru.rs`).
//!
//! **Threads.** The cache writes, through `&mut self`; a [`Prober`] reads beside it, at any time,
//! from any number of threads, and the writer never waits for it (`seqlock.rs`).

mod hash;
mod namespaces;
mod prober;
mod seqlock;
mod shared;
mod table;
pub(in crate::cache) mod work;

pub(super) use namespaces::NameWords;
pub use namespaces::{KeyPart, Namespace};
use prober::Window;
pub use prober::{Probe, Prober};
pub(super) use shared::{ChainKeys, Walk};
pub(super) use table::ProbeTable;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use namespaces::NamespaceRefs;
use shared::{PUBLISHED, Shared, halves, word};

use crate::device::{all_of, table_of};
use crate::error::DeviceError;
use crate::plan::{GroupReuse, NO_BLOCK, Plan};

/// The index, and what only its writer needs.
#[derive(Debug)]
pub(super) struct PrefixIndex {
    shared: Arc<Shared>,
    names: NamespaceRefs,
    lead: usize,
    /// The windowed paged groups, in the order of `Shared::attached`.
    windowed: Vec<usize>,
    /// What a match needs of them. `[windowed groups]`
    windows: Arc<[Window]>,
    /// For each of their blocks, the block of the lead group that it is attached to.
    /// `[windowed groups][blocks]`
    lead_of: Vec<Vec<u32>>,
    /// Published blocks.
    published: usize,
}

impl PrefixIndex {
    /// The index of a plan; `None` where the plan has no lead group.
    pub(super) fn new(plan: &Plan, constant_hash: bool) -> Result<Option<Self>, DeviceError> {
        let Some(lead) = plan.reuse.lead else { return Ok(None) };
        let lead = lead.index();
        let kinds = plan.reuse.groups.iter().enumerate();
        let windowed: Vec<usize> =
            kinds.filter(|(_, kind)| **kind == GroupReuse::Attached).map(|(g, _)| g).collect();
        let blocks = plan.groups[lead].layout.units;
        let namespaces = plan.max_namespaces();
        let hash_mask = if constant_hash { 0 } else { u64::MAX };
        let shared =
            Shared::new(blocks, plan.tokens_per_block, namespaces, windowed.len(), hash_mask)?;
        let lead_of = windowed.iter().map(|g| plan.groups[*g].layout.units as usize);
        Ok(Some(Self {
            shared: Arc::new(shared),
            names: NamespaceRefs::new(namespaces)?,
            lead,
            lead_of: all_of(lead_of.map(|units| table_of(units, NO_BLOCK)))?,
            windows: windowed.iter().map(|g| Window::of(plan, *g)).collect(),
            windowed,
            published: 0,
        }))
    }

    /// The lead group.
    pub(super) fn lead(&self) -> usize {
        self.lead
    }

    /// The windowed paged groups, in the order in which they are numbered here.
    pub(super) fn windowed(&self) -> &[usize] {
        &self.windowed
    }

    /// A reader that works beside the writer.
    pub(super) fn prober(&self) -> Prober {
        Prober::new(Arc::clone(&self.shared), Arc::clone(&self.windows))
    }

    /// Walks along a prompt as far as the index has it.
    pub(super) fn walk(&self, prompt: &[u32], namespace: &Namespace) -> Walk {
        self.shared.walk(prompt, &self.shared.keys(namespace))
    }

    /// The longest part of a match for which every windowed group still has its blocks.
    pub(super) fn fit_windows(&self, walk: &Walk) -> Probe {
        self.shared.fit_windows(walk, &self.windows)
    }

    /// New sequences begin in another epoch.
    pub(super) fn set_epoch(&mut self, epoch: u64) {
        let shared = &self.shared;
        shared.version.write(|| shared.epoch.store(epoch, Relaxed));
    }

    /// The numbers under which a prompt's namespaces are known now; 0 for one that is not in use.
    pub(super) fn keys(&self, namespace: &Namespace) -> ChainKeys {
        self.shared.keys(namespace)
    }

    /// The namespaces of a new sequence, each with one reference more; [`ChainKeys::NONE`], which
    /// shares nothing, when there is no room for them.
    pub(super) fn take_keys(&mut self, namespace: &Namespace) -> ChainKeys {
        let Self { shared, names, .. } = self;
        let epoch = shared.epoch.load(Relaxed);
        let salted_at = namespace.salt_from / shared.tokens_per_block();
        let split = namespace.salt.is_some() && salted_at > 0;
        let first_key = namespace.key(epoch, !split);
        shared.version.write(|| {
            let Some(first) = names.take(&shared.names, &first_key) else { return ChainKeys::NONE };
            if !split {
                return ChainKeys { first, salted: 0, salted_at: 0 };
            }
            match names.take(&shared.names, &namespace.key(epoch, true)) {
                Some(salted) => ChainKeys { first, salted, salted_at },
                None => {
                    names.drop(&shared.names, first);
                    ChainKeys::NONE
                }
            }
        })
    }

    /// Salt, adapter and model of a namespace in use, and its epoch.
    pub(super) fn name(&self, id: u32) -> Option<(NameWords, u64)> {
        self.shared.names.words(id)
    }

    /// The number of a namespace of the present epoch, with one reference more; `None` when there
    /// is no room for it.
    pub(super) fn take_name(&mut self, words: &NameWords) -> Option<u32> {
        let Self { shared, names, .. } = self;
        let mut key = [0; namespaces::WORDS];
        key[..words.len()].copy_from_slice(words);
        key[words.len()] = shared.epoch.load(Relaxed);
        shared.version.write(|| names.take(&shared.names, &key))
    }

    /// One reference more to a sequence's namespaces.
    pub(super) fn add_keys(&mut self, keys: &ChainKeys) {
        self.names.add(keys.first);
        self.names.add(keys.salted);
    }

    /// One reference less.
    pub(super) fn drop_keys(&mut self, keys: &ChainKeys) {
        self.drop_name(keys.salted);
        self.drop_name(keys.first);
    }

    /// One reference less to a namespace; 0 is none.
    pub(super) fn drop_name(&mut self, id: u32) {
        let Self { shared, names, .. } = self;
        if names.is_last(id) {
            shared.version.write(|| names.drop(&shared.names, id));
        } else {
            names.drop(&shared.names, id);
        }
    }

    /// The hash of the chain up to a published block; of nothing for [`NO_BLOCK`].
    pub(super) fn hash_after(&self, block: u32) -> u64 {
        let node = self.shared.nodes.get(block as usize);
        node.map_or(hash::SEED, |node| node.hash.load(Relaxed))
    }

    /// The hash of the chain that goes on from `before` with a block.
    pub(super) fn chain(&self, before: u64, tokens: &[u32], ns: u32) -> u64 {
        self.shared.chain(before, tokens, ns)
    }

    /// The published block with this parent, namespace and tokens.
    pub(super) fn find(&self, hash: u64, parent: u32, ns: u32, tokens: &[u32]) -> Option<u32> {
        self.shared.find(hash, parent, ns, tokens)
    }

    /// The parent of a published block.
    pub(super) fn parent(&self, block: u32) -> u32 {
        self.shared.parent(block)
    }

    /// Whether a block of the lead group is published.
    pub(super) fn is_published(&self, block: u32) -> bool {
        let node = self.shared.nodes.get(block as usize);
        node.is_some_and(|node| node.back.load(Relaxed) & PUBLISHED != 0)
    }

    /// Whether a published block has no children.
    pub(super) fn is_leaf(&self, block: u32) -> bool {
        let node = self.shared.nodes.get(block as usize);
        node.is_some_and(|node| halves(node.down.load(Relaxed)).0 == NO_BLOCK)
    }

    /// The children of a published block.
    pub(super) fn children(&self, block: u32) -> impl Iterator<Item = u32> + '_ {
        let node = self.shared.nodes.get(block as usize);
        let first = node.map_or(NO_BLOCK, |node| halves(node.down.load(Relaxed)).0);
        let first = Some(first).filter(|first| *first != NO_BLOCK);
        std::iter::successors(first, |child| self.sibling(*child))
    }

    /// Calls `each` with every published block, a parent before its children. Follows the links, so
    /// it needs no memory.
    pub(super) fn each_published(&self, each: &mut dyn FnMut(u32)) {
        let nodes = (0..).zip(&self.shared.nodes);
        let roots = nodes.filter(|(block, node)| {
            self.is_published(*block) && halves(node.up.load(Relaxed)).0 == NO_BLOCK
        });
        for (root, _) in roots {
            let mut block = root;
            each(block);
            'tree: loop {
                if let Some(child) = self.children(block).next() {
                    block = child;
                } else {
                    while block != root && self.sibling(block).is_none() {
                        block = self.parent(block);
                    }
                    match self.sibling(block) {
                        Some(sibling) if block != root => block = sibling,
                        _ => break 'tree,
                    }
                }
                each(block);
            }
        }
    }

    /// The blocks of a windowed group that are attached, with those of the lead group.
    pub(super) fn attachments(&self, windowed: usize) -> impl Iterator<Item = (u32, u32)> + '_ {
        (0..)
            .zip(&self.lead_of[windowed])
            .filter(|(_, of)| **of != NO_BLOCK)
            .map(|(b, of)| (b, *of))
    }

    /// The next child of the same parent.
    pub(super) fn sibling(&self, block: u32) -> Option<u32> {
        let next = halves(self.shared.nodes.get(block as usize)?.down.load(Relaxed)).1;
        Some(next).filter(|next| *next != NO_BLOCK)
    }

    /// The priority that a published block was given itself, its children aside.
    pub(super) fn own_class(&self, block: u32) -> u8 {
        let back = self.shared.nodes[block as usize].back.load(Relaxed);
        // The byte above the lower half.
        u8::try_from(back >> 32 & 0xFF).unwrap_or(u8::MAX)
    }

    /// Gives a published block a priority of its own.
    pub(super) fn set_own_class(&self, block: u32, class: u8) {
        let back = &self.shared.nodes[block as usize].back;
        let rest = back.load(Relaxed) & !(0xFF << 32);
        back.store(rest | u64::from(class) << 32, Relaxed);
    }

    /// Reads the tokens of a published block. `[tokens_per_block]`
    pub(super) fn load_tokens(&self, block: u32, tokens: &mut [u32]) {
        self.shared.load_tokens(block, tokens);
    }

    /// The namespace that begins at a published block; 0 for none.
    pub(super) fn namespace_of(&self, block: u32) -> u32 {
        halves(self.shared.nodes[block as usize].up.load(Relaxed)).1
    }

    /// Publishes a full block behind its parent.
    pub(super) fn insert(
        &mut self,
        block: u32,
        (parent, ns): (u32, u32),
        tokens: &[u32],
        hash: u64,
        class: u8,
    ) {
        self.names.add(ns);
        self.published += 1;
        let shared = &self.shared;
        shared.version.write(|| {
            shared.store_tokens(block, tokens);
            let first = self.swap_first_child(parent, ns, block);
            let node = &shared.nodes[block as usize];
            node.up.store(word(parent, ns), Relaxed);
            node.down.store(word(NO_BLOCK, first), Relaxed);
            node.hash.store(hash, Relaxed);
            let back = word(NO_BLOCK, 0) | u64::from(class) << 32 | PUBLISHED;
            node.back.store(back, Relaxed);
            self.set_previous(first, block);
            shared.table.insert(hash::tag(hash), block);
        });
    }

    /// Takes a block without children out of the index. What is attached to it must have been
    /// detached.
    pub(super) fn remove(&mut self, block: u32) {
        debug_assert!(self.is_published(block) && self.is_leaf(block), "a published leaf");
        self.published -= 1;
        let shared = &self.shared;
        let node = &shared.nodes[block as usize];
        let (parent, ns) = halves(node.up.load(Relaxed));
        shared.version.write(|| {
            shared.table.remove(hash::tag(node.hash.load(Relaxed)), block);
            let next = halves(node.down.load(Relaxed)).1;
            let previous = halves(node.back.load(Relaxed)).0;
            match shared.nodes.get(previous as usize) {
                Some(before) => {
                    let child = halves(before.down.load(Relaxed)).0;
                    before.down.store(word(child, next), Relaxed);
                }
                None => {
                    self.swap_first_child(parent, ns, next);
                }
            }
            self.set_previous(next, previous);
            node.up.store(u64::from(NO_BLOCK), Relaxed);
            node.down.store(word(NO_BLOCK, NO_BLOCK), Relaxed);
            node.hash.store(0, Relaxed);
            node.back.store(u64::from(NO_BLOCK), Relaxed);
        });
        self.drop_name(ns);
    }

    /// Makes a block the first child of another, or the first root of a namespace; gives the one
    /// that was it.
    fn swap_first_child(&self, parent: u32, ns: u32, child: u32) -> u32 {
        match self.shared.nodes.get(parent as usize) {
            Some(node) => {
                let (first, sibling) = halves(node.down.load(Relaxed));
                node.down.store(word(child, sibling), Relaxed);
                first
            }
            None => self.shared.names.root(ns).map_or(NO_BLOCK, |root| {
                let first = root.load(Relaxed);
                root.store(child, Relaxed);
                first
            }),
        }
    }

    fn set_previous(&self, block: u32, previous: u32) {
        if let Some(node) = self.shared.nodes.get(block as usize) {
            let rest = node.back.load(Relaxed) & !u64::from(u32::MAX);
            node.back.store(rest | u64::from(previous), Relaxed);
        }
    }

    /// Tells the processor that a block is about to be published behind a chain with this hash.
    #[inline]
    pub(super) fn prefetch_insert(&self, block: u32, hash: u64) {
        self.shared.table.prefetch(hash::tag(hash));
        self.shared.prefetch_block(block);
    }

    /// Tells the processor that a block's node will be read.
    #[inline]
    pub(super) fn prefetch_node(&self, block: u32) {
        if let Some(node) = self.shared.nodes.get(block as usize) {
            crate::device::prefetch(node);
        }
    }

    /// Tells the processor that a block will be taken out of the table. Its node should be there.
    #[inline]
    pub(super) fn prefetch_place(&self, block: u32) {
        if let Some(node) = self.shared.nodes.get(block as usize) {
            self.shared.table.prefetch(hash::tag(node.hash.load(Relaxed)));
        }
    }

    /// The block of a windowed group that holds a published block's tokens; [`NO_BLOCK`] for none.
    pub(super) fn attached(&self, windowed: usize, lead_block: u32) -> u32 {
        self.shared.attached(windowed, lead_block)
    }

    /// The lead group's block that a block of a windowed group is attached to; [`NO_BLOCK`] for
    /// none.
    pub(super) fn lead_of(&self, windowed: usize, block: u32) -> u32 {
        self.lead_of[windowed].get(block as usize).copied().unwrap_or(NO_BLOCK)
    }

    /// Attaches a full block of a windowed group to the published block with the same tokens.
    pub(super) fn attach(&mut self, windowed: usize, lead_block: u32, block: u32) {
        self.lead_of[windowed][block as usize] = lead_block;
        let shared = &self.shared;
        let entry = &shared.attached[windowed][lead_block as usize];
        shared.version.write(|| entry.store(block, Relaxed));
    }

    /// Undoes [`PrefixIndex::attach`]; gives the block.
    pub(super) fn detach(&mut self, windowed: usize, lead_block: u32) -> u32 {
        let shared = &self.shared;
        let entry = &shared.attached[windowed][lead_block as usize];
        let block = entry.load(Relaxed);
        if let Some(lead) = self.lead_of[windowed].get_mut(block as usize) {
            *lead = NO_BLOCK;
            shared.version.write(|| entry.store(NO_BLOCK, Relaxed));
        }
        block
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        let shared = &self.shared;
        shared.version.write(|| {
            shared.table.clear();
            shared.names.clear();
            for node in &shared.nodes {
                node.up.store(u64::from(NO_BLOCK), Relaxed);
                node.down.store(word(NO_BLOCK, NO_BLOCK), Relaxed);
                node.hash.store(0, Relaxed);
                node.back.store(u64::from(NO_BLOCK), Relaxed);
            }
            for entry in shared.attached.iter().flatten() {
                entry.store(NO_BLOCK, Relaxed);
            }
        });
        self.set_epoch(0);
        self.names.clear();
        self.published = 0;
        self.lead_of.iter_mut().flatten().for_each(|lead| *lead = NO_BLOCK);
    }

    /// Published blocks, as counted, and as the table has them.
    pub(super) fn len(&self) -> (usize, usize) {
        (self.published, self.shared.table.len())
    }

    /// Whether no block is published.
    pub(super) fn is_empty(&self) -> bool {
        self.published == 0
    }

    /// Ids in use with their references, and the free ids.
    pub(super) fn names(&self) -> (impl Iterator<Item = (u32, u32)> + '_, &[u32]) {
        (self.names.in_use(), self.names.free())
    }
}
