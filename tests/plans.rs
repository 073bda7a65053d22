//! Plans: the derived numbers of every file in `configs/`, and the well-known formula.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use kvpool::cache::Cache;
use kvpool::config::{CacheMode, Format, PRESETS, ScaleKind, load};
use kvpool::plan::Plan;
use kvpool::units::Bytes;

use crate::common::Spec;

/// Every file in `configs/` and its folders, with the plan of every variant. The baseline `dynamic`
/// has no plan: it is what there was before pools.
pub(crate) fn config_plans() -> Vec<(String, Vec<(String, Plan)>)> {
    let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs");
    config_files(&configs)
        .iter()
        .map(|path| {
            let source = load(path, &[]).unwrap_or_else(|error| panic!("{error}"));
            let plans = source
                .variants()
                .into_iter()
                .filter(|(_, config)| config.cache.mode != CacheMode::Dynamic)
                .map(|(name, config)| (name, Plan::new(&config, &source.geometry).unwrap()))
                .collect();
            let name = path.strip_prefix(&configs).unwrap().with_extension("");
            (name.to_string_lossy().replace('/', "-"), plans)
        })
        .collect()
}

/// The TOML files of a folder and of the folders in it, in the order of their names.
fn config_files(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let of = |path: &PathBuf| match path.extension() {
        _ if path.is_dir() => config_files(path),
        Some(extension) if extension == "toml" => vec![path.clone()],
        _ => Vec::new(),
    };
    paths.iter().flat_map(of).collect()
}

/// A change of a snapshot is a change of what users get from the same file: look twice.
#[test]
fn plans_of_all_configs_are_as_before() {
    let plans = config_plans();
    assert!(plans.len() >= 24, "{} files", plans.len());
    for (name, variants) in plans {
        let mut text = String::new();
        for (variant, plan) in variants {
            writeln!(text, "variant {variant}\n\n{}", plan.explain()).unwrap();
            for term in &plan.host_terms {
                writeln!(text, "host {:>12} B  {}", term.bytes.get(), term.what).unwrap();
            }
            writeln!(text).unwrap();
        }
        insta::with_settings!({ prepend_module_to_snapshot => false, omit_expression => true }, {
            insta::assert_snapshot!(name, text);
        });
    }
}

/// The plan of a model whose layers are all full, contiguous and f16.
fn full_model(layers: usize, kv_heads: u32, len: u32, seqs: u32) -> Plan {
    Spec {
        mode: CacheMode::Contiguous,
        format: Format::F16,
        windows: vec![0; layers],
        num_q_heads: kv_heads,
        num_kv_heads: kv_heads,
        head_dim: 128,
        max_seqs: seqs,
        max_seq_len: len,
        ..Spec::default()
    }
    .plan()
}

#[test]
fn well_known_sizes() {
    let gib = |numerator: u64, denominator: u64| Bytes((numerator << 30) / denominator);
    // 7B: 32 layers, 32 heads, 2,048 tokens, one sequence and eight.
    assert_eq!(full_model(32, 32, 2048, 1).pool_bytes, Bytes(1_073_741_824));
    assert_eq!(full_model(32, 32, 2048, 8).pool_bytes, gib(8, 1));
    // 13B at 4,096 tokens: 3.125 GiB.
    assert_eq!(full_model(40, 40, 4096, 1).pool_bytes, gib(25, 8));
    // 70B at 8,192 tokens: 20 GiB with 64 KV heads, 2.5 GiB with 8.
    assert_eq!(full_model(80, 64, 8192, 1).pool_bytes, gib(20, 1));
    assert_eq!(full_model(80, 8, 8192, 1).pool_bytes, gib(5, 2));
}

#[test]
fn the_7b_example_is_exact_and_says_so() {
    let plans = config_plans();
    let (_, variants) =
        plans.iter().find(|(name, _)| name == "llama-2-7b-one-sequence").expect("the file");
    let plan = &variants[0].1;
    assert_eq!(plan.pool_bytes, Bytes(1_073_741_824));
    assert_eq!(plan.padding_bytes, Bytes::ZERO);
    let text = plan.explain();
    assert!(text.contains("1,073,741,824 B"), "{text}");
    assert!(text.contains("2 (K, V) × 32 layers × 32 KV heads × 128 × 2 B = 524,288 B"), "{text}");
}

#[test]
fn presets_plan_to_the_formula() {
    for preset in PRESETS {
        let geometry = preset.geometry();
        let naive = 2
            * u64::from(geometry.num_layers)
            * u64::from(geometry.num_kv_heads)
            * u64::from(geometry.head_dim);
        for (format, bytes) in
            [(Format::F32, 4), (Format::F16, 2), (Format::Bf16, 2), (Format::Int8, 1)]
        {
            for mode in [CacheMode::Contiguous, CacheMode::Paged] {
                let spec = Spec {
                    mode,
                    format,
                    scale: ScaleKind::PerTensor,
                    windows: geometry.windows.clone(),
                    num_q_heads: geometry.num_q_heads,
                    num_kv_heads: geometry.num_kv_heads,
                    head_dim: geometry.head_dim,
                    max_seq_len: 4096.min(preset.max_position),
                    ..Spec::default()
                };
                let plan = spec.plan();
                assert_eq!(plan.bytes_per_token.0, naive * bytes, "{} {format:?}", preset.name);
            }
        }
    }
}

/// P2: what is allocated is what the plan says, to the byte.
#[test]
fn allocated_equals_planned() {
    for (name, variants) in config_plans() {
        for (variant, plan) in variants {
            if plan.pool_bytes > Bytes(256 << 20) {
                continue;
            }
            let device = kvpool::config::DeviceConfig::default();
            let device = kvpool::device::cpu::CpuDevice::open(&plan, &device, None).unwrap();
            let planned = plan.pool_bytes;
            let cache = Cache::open(plan, Box::new(device)).unwrap();
            assert_eq!(cache.device_info().pool_bytes, planned, "{name} {variant}");
        }
    }
}

/// The README's configuration is a file that plans, and its library example is the one that the
/// documentation tests run.
#[test]
fn the_readme_shows_what_works() {
    let readme = include_str!("../README.md");
    let block = |heading: &str| -> String {
        let section = readme.split(heading).nth(1).expect("the section");
        let lines = section.lines().skip_while(|line| !line.starts_with("    "));
        let block = lines.take_while(|line| line.starts_with("    ") || line.is_empty());
        block.map(|line| format!("{}\n", line.get(4..).unwrap_or_default())).collect()
    };
    let source = kvpool::config::parse(&block("## The configuration"), "README.md".as_ref(), &[]);
    let source = source.unwrap_or_else(|error| panic!("{error}"));
    let plan = Plan::new(&source.config, &source.geometry).unwrap();
    let limit = source.config.device.memory_limit.expect("shown");
    plan.check_memory(Bytes(0), limit, "the README").unwrap();
    assert!(plan.full_length_seqs > 0, "{}", plan.explain());

    let library = include_str!("../src/lib.rs");
    let shown = block("## The library");
    assert!(shown.lines().count() > 15, "{shown}");
    for line in shown.lines() {
        assert!(library.contains(line.trim()), "not in the tested example: {line}");
    }
}
