//! A step's tables in device memory, for an engine's own kernels.

use kvpool::cache::BeginOptions;
use kvpool::config::CacheMode;
use kvpool::device::DeviceTables;
use kvpool::plan::GroupKind;
use kvpool::units::GroupIdx;

use super::driver::{self, Memory, counter};
use crate::common::Spec;

/// Both halves of each number.
fn halves(numbers: &[u64]) -> Vec<u32> {
    numbers.iter().flat_map(|n| [*n as u32, (n >> 32) as u32]).collect()
}

#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn tables_in_device_memory_are_those_of_the_step() {
    driver::enter();
    let spec = Spec {
        windows: vec![0, 0, 16],
        sink_tokens: 3,
        max_step_tokens: Some(40),
        ..Spec::mode(CacheMode::Hybrid)
    };
    let mut cache = spec.open();
    let mut begin = |len: u32, from: u32| {
        let prompt: Vec<u32> = (from..from + len).collect();
        let sequence = cache.begin(&prompt, BeginOptions::default()).expect("fits").sequence;
        let mut step = cache.reserve(&[(sequence, len)]).expect("fits");
        step.mark_all_appended();
        step.commit().expect("whole");
        sequence
    };
    // Not in the order of their slots.
    let (a, b, c) = (begin(40, 0), begin(7, 100), begin(21, 200));
    let mut places: Vec<DeviceTables> = Vec::new();
    for round in 0..3 {
        let mut step = cache.reserve(&[(c, 2), (a, 1), (b, 3)]).expect("fits");
        for group in 0..3 {
            let at = GroupIdx(group);
            let paged = step.plan().groups[at.index()].kind == GroupKind::Paged;
            let before = (counter("allocations"), counter("synchronisations"));
            let tables = step.upload_tables(at, true, true).expect("uploads");
            let after = (counter("allocations"), counter("synchronisations"));
            assert_eq!(after, before, "nothing is allocated or waited for");
            // The same places in every step.
            if round == 0 {
                places.push(tables);
            }
            assert_eq!(tables, places[group as usize]);
            check(&mut step, at, &tables, paged);
            let csr_alone = step.upload_tables(at, true, false).expect("uploads");
            let dense = DeviceTables { block_table: 0, block_table_row: 0, ..tables };
            assert_eq!(csr_alone, dense);
        }
        step.mark_all_appended();
        step.commit().expect("whole");
    }
    let mut step = cache.reserve(&[(a, 1)]).expect("fits");
    step.upload_tables(GroupIdx(3), true, true).expect_err("no such group");
}

/// Compares what is in device memory with what the step says.
fn check(step: &mut kvpool::cache::Step<'_>, at: GroupIdx, tables: &DeviceTables, paged: bool) {
    step.build_csr();
    let read = |address, expected: &[u32]| {
        // The copies are in the cache's stream; this waits for all of the context's.
        driver::wait();
        assert_eq!(Memory::read_u32(address, expected.len()), expected);
    };
    read(tables.positions, step.positions());
    read(tables.seq_lens, step.seq_lens());
    read(tables.token_slots, &halves(step.token_slots(at).expect("a group")));
    if !paged {
        let none = [tables.block_table, tables.kv_indptr, tables.kv_indices];
        assert_eq!(none, [0; 3]);
        return;
    }
    let csr = step.csr(at).expect("built");
    read(tables.kv_indptr, csr.kv_indptr);
    read(tables.kv_indices, csr.kv_indices);
    read(tables.kv_last_block_len, csr.kv_last_block_len);
    read(tables.kv_first_position, csr.kv_first_position);
    let (table, row) = step.block_table(at).expect("paged");
    assert_eq!(tables.block_table_row, row);
    let of_slot = |slot: u32| &table[(slot * row) as usize..][..row as usize];
    let rows: Vec<u32> = step.seqs().iter().flat_map(|seq| of_slot(seq.slot)).copied().collect();
    read(tables.block_table, &rows);
}
