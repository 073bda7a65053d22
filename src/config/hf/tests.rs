use super::*;

/// The geometry of a JSON text that stands in `config.json`.
fn read_text(text: &str) -> Result<Geometry, ConfigError> {
    geometry(text, Path::new("config.json"), 0)
}

/// The message of a text that is refused.
fn refused(text: &str) -> String {
    read_text(text).unwrap_err().to_string()
}

fn same_as_preset(text: &str, name: &str) {
    let preset = super::super::PRESETS.iter().find(|preset| preset.name == name).unwrap();
    assert_eq!(read_text(text).unwrap(), preset.geometry(), "{name}");
}

#[test]
fn llama_has_no_windows() {
    let text = r#"{
        "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rope_scaling": null
    }"#;
    same_as_preset(text, "llama-3-8b");
    // Before grouped queries there was no num_key_value_heads.
    let text = r#"{ "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 32 }"#;
    same_as_preset(text, "llama-2-7b");
}

#[test]
fn gemma_takes_the_defaults_of_its_class() {
    // A real gemma-3-4b leaves out both head counts and head_dim.
    let text = r#"{
        "model_type": "gemma3",
        "vision_config": { "num_hidden_layers": 27, "num_attention_heads": 16 },
        "text_config": { "model_type": "gemma3_text", "hidden_size": 2560,
                         "num_hidden_layers": 34, "sliding_window": 1024 }
    }"#;
    same_as_preset(text, "gemma-3-4b");
    let text = r#"{ "model_type": "gemma3_text", "hidden_size": 640, "num_hidden_layers": 18,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "sliding_window": 512, "sliding_window_pattern": 6 }"#;
    same_as_preset(text, "gemma-3-270m");
    let text = r#"{ "model_type": "gemma2", "hidden_size": 4608, "num_hidden_layers": 46,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128 }"#;
    same_as_preset(text, "gemma-2-27b");
}

#[test]
fn gpt_oss_alternates_with_and_without_a_list() {
    let types = ["sliding_attention", "full_attention"].repeat(12);
    let list = format!(", \"layer_types\": {}", serde_json::to_string(&types).unwrap());
    for list in ["", &list] {
        let text = format!(
            r#"{{ "model_type": "gpt_oss", "hidden_size": 2880, "head_dim": 64,
            "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
            "sliding_window": 128 {list} }}"#
        );
        same_as_preset(&text, "gpt-oss-20b");
    }
}

#[test]
fn qwen_uses_windows_only_when_told_to() {
    let text = |extra: &str| {
        format!(
            r#"{{ "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4,
            "sliding_window": 131072, "max_window_layers": 20 {extra} }}"#
        )
    };
    same_as_preset(&text(r#", "use_sliding_window": false"#), "qwen2.5-7b");
    same_as_preset(&text(""), "qwen2.5-7b");
    let windows = read_text(&text(r#", "use_sliding_window": true"#)).unwrap().windows;
    assert_eq!(windows[..20], [0; 20]);
    assert_eq!(windows[20..], [131_072; 8]);
    // The class has a head_dim that is not hidden_size / heads.
    let text = r#"{ "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "sliding_window": null }"#;
    same_as_preset(text, "qwen3-0.6b");
}

#[test]
fn windows_for_every_layer() {
    let phi = r#"{ "model_type": "phi3", "hidden_size": 3072, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "sliding_window": 2047 }"#;
    same_as_preset(phi, "phi-3-mini-4k");
    let mistral = r#"{ "model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 4096 }"#;
    same_as_preset(mistral, "mistral-7b-v0.1");
    same_as_preset(&mistral.replace(": 4096 }", ": null }"), "mistral-7b-v0.3");
    same_as_preset(
        &mistral.replace(": 4096 }", ": null }").replace("mistral", "mixtral"),
        "mixtral-8x7b-v0.1",
    );
    for key in ["sliding_window", "sliding_window_pattern"] {
        let zero = mistral.replace(": 4096 }", &format!(": 4096,\n \"{key}\": 0 }}"));
        let start = format!("config.json:3: {key}: is 0; expected a whole number above 0");
        assert!(refused(&zero).starts_with(&start));
    }
    let unknown = mistral.replace("mistral", "newmodel");
    assert!(refused(&unknown).contains("config.json:2: sliding_window: is 4096, and nothing says"));
}

#[test]
fn models_without_plain_k_and_v_are_refused_by_name() {
    let mla =
        "{\n\"model_type\": \"deepseek_v3\",\n\"kv_lora_rank\": 512,\n\"num_hidden_layers\": 61\n}";
    let message = refused(mla);
    assert!(message.starts_with("config.json:3: kv_lora_rank: the model uses multi-head latent"));
    let linear = "{ \"num_hidden_layers\": 2, \"num_attention_heads\": 8, \"head_dim\": 64,\n\
        \"layer_types\": [\"full_attention\", \"linear_attention\"] }";
    let message = refused(linear);
    assert!(
        message
            .starts_with("config.json:2: layer_types: layer 1 is the string \"linear_attention\"")
    );
    let short = linear.replace(", \"linear_attention\"", "");
    assert!(refused(&short).contains("layer_types: has 1 entry for 2 layers"));
    // Bamba's form, and a model that has no attention at all, whatever its file says of heads.
    let bamba = linear.replace(
        "\"layer_types\": [\"full_attention\", \"linear_attention\"]",
        "\"attn_layer_indices\": [1]",
    );
    assert!(refused(&bamba).contains("attn_layer_indices: some layers are state-space layers"));
    let mamba = bamba.replace("\"attn_layer_indices\": [1]", "\"model_type\": \"falcon_mamba\"");
    assert!(
        refused(&mamba)
            .contains("config.json:2: model_type: its layers are recurrent or state-space")
    );
    let shared = linear.replace("layer_types", "num_kv_shared_layers");
    assert!(refused(&shared).contains("num_kv_shared_layers: some layers have no K and V"));
}

#[test]
fn damage_is_located() {
    for (text, message) in [
        ("", "config.json:1: is no JSON"),
        ("[1]", "config.json:1: holds a list; expected the object"),
        ("{\n\"num_hidden_layers\": 2,,\n}", "config.json:2: is no JSON"),
        ("{}", "config.json: num_hidden_layers: is missing; expected a whole number"),
        (
            "{\n\n\"num_hidden_layers\": \"2\"}",
            "config.json:3: num_hidden_layers: found the string \"2\"; expected a whole",
        ),
        ("{\"num_hidden_layers\": 2.5}", "config.json:1: num_hidden_layers: found the number 2.5"),
        ("{\"num_hidden_layers\": -2}", "config.json:1: num_hidden_layers: found the number -2"),
        (
            "{\"text_config\": {\"num_hidden_layers\": 2}}",
            "config.json:1: text_config.num_attention_heads: is missing",
        ),
        (
            "{\"num_hidden_layers\": 2, \"num_attention_heads\": 3,\n\"hidden_size\": 100}",
            "config.json:2: hidden_size: 100 is no multiple",
        ),
        (
            "{\"num_hidden_layers\": 2, \"num_attention_heads\": 0,\n\"hidden_size\": 64}",
            "config.json:1: num_attention_heads: 0 is out of range",
        ),
        (
            "{\"num_hidden_layers\": 2, \"num_attention_heads\": 4}",
            "config.json: head_dim: is missing; expected head_dim, or hidden_size",
        ),
    ] {
        let found = refused(text);
        assert!(found.starts_with(message), "{text}\n{found}\n{message}");
    }
}
