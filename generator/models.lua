-- models.lua: presets: the sliding-window layers of published models.  Data only.
--
-- `window` is what model cards print: the keys a query sees with its own, causal; window_left =
-- window - 1. `pattern` is sliding:full layers; `swa_layers` counts the sliding ones.  Heads and
-- dims are those of the sliding layers.  `note` says what could not be verified in a public
-- source.

local GEMMA = "google-deepmind/gemma gemma/gm/nn/_gemma.py"
local COUNT_NOTE = "the count of sliding layers follows from the pattern"

-- A row has what its family has, unless it says otherwise.
local families = {
  { family = "gpt-oss", pattern = "1:1", q_heads = 64, kv_heads = 8, head_dim = 64, window = 128,
    sinks = true,
    { name = "gpt-oss-20b", layers = 24, swa_layers = 12,
      source = "openai/gpt-oss gpt_oss/torch/model.py; NVIDIA/Megatron-LM "
        .. "examples/post_training/modelopt/conf/openai/gpt-oss-20b.sh" },
    { name = "gpt-oss-120b", layers = 36, swa_layers = 18,
      source = "openai/gpt-oss gpt_oss/torch/model.py; Hugging Face GptOssConfig defaults" },
  },
  { family = "gemma-2", pattern = "1:1", head_dim = 256, window = 4096, softcap = 50,
    source = GEMMA .. "; google/gemma_pytorch gemma/config.py",
    { name = "gemma-2-2b", layers = 26, swa_layers = 13, q_heads = 8, kv_heads = 4,
      source = GEMMA },
    { name = "gemma-2-9b", layers = 42, swa_layers = 21, q_heads = 16, kv_heads = 8 },
    { name = "gemma-2-27b", layers = 46, swa_layers = 23, q_heads = 32, kv_heads = 16,
      head_dim = 128, scale = 1 / math.sqrt(144) },
  },
  { family = "gemma-3", pattern = "5:1", head_dim = 256, window = 1024, source = GEMMA,
    note = COUNT_NOTE,
    { name = "gemma-3-270m", layers = 18, swa_layers = 15, q_heads = 4, kv_heads = 1,
      window = 512 },
    { name = "gemma-3-1b", layers = 26, swa_layers = 22, q_heads = 4, kv_heads = 1,
      window = 512 },
    { name = "gemma-3-4b", layers = 34, swa_layers = 29, q_heads = 8, kv_heads = 4 },
    { name = "gemma-3-12b", layers = 48, swa_layers = 40, q_heads = 16, kv_heads = 8,
      note = "the layer count, and with it that of sliding layers, was not verified" },
    { name = "gemma-3-27b", layers = 62, swa_layers = 52, q_heads = 32, kv_heads = 16,
      head_dim = 128, scale = 1 / math.sqrt(168) },
  },
  { family = "gemma-4", pattern = "5:1", head_dim = 256, window = 1024, note = COUNT_NOTE,
    source = "google-deepmind/gemma gemma/gm/nn/gemma4/_gemma4.py",
    { name = "gemma-4-e2b", layers = 35, swa_layers = 28, q_heads = 8, kv_heads = 1,
      window = 512, pattern = "4:1" },
    { name = "gemma-4-e4b", layers = 42, swa_layers = 35, q_heads = 8, kv_heads = 2,
      window = 512 },
    { name = "gemma-4-31b", layers = 60, swa_layers = 50, q_heads = 32, kv_heads = 16 },
    { name = "gemma-4-26b-a4b", layers = 30, swa_layers = 25, q_heads = 16, kv_heads = 8 },
  },
  { family = "mimo", pattern = "5:1", q_heads = 64, kv_heads = 8, head_dim_qk = 192,
    head_dim_v = 128, window = 128, sinks = true,
    { name = "mimo-v2-flash", layers = 48, swa_layers = 39,
      source = "Hugging Face MiMoV2FlashConfig; NVIDIA-NeMo/Megatron-Bridge mimo_v2_flash",
      note = "values are scaled by 0.707 outside of attention" },
  },
  { family = "mistral", pattern = "1:0", q_heads = 32, kv_heads = 8, head_dim = 128, window = 4096,
    { name = "mistral-7b-v0.1", layers = 32, swa_layers = 32,
      source = "Hugging Face MistralConfig defaults" },
  },
  { family = "olmo-3", pattern = "3:1", head_dim = 128, window = 4096,
    { name = "olmo-3-7b", layers = 32, swa_layers = 24, q_heads = 32, kv_heads = 32,
      source = "Hugging Face Olmo3Config; allenai/OLMo-core olmo3_7B" },
    { name = "olmo-3-32b", layers = 64, swa_layers = 48, q_heads = 40, kv_heads = 8,
      source = "allenai/OLMo-core olmo3_32B",
      note = "the head counts come from secondary pages" },
  },
  { family = "command-r", pattern = "3:1", q_heads = 32, kv_heads = 8, head_dim = 128,
    window = 4096,
    { name = "command-r7b", layers = 32, swa_layers = 24, source = "Hugging Face Cohere2Config",
      note = "the head counts follow from projection widths in a repository card" },
  },
  { family = "step", pattern = "3:1", q_heads = 96, kv_heads = 8, head_dim = 128, window = 512,
    { name = "step-3.5-flash", layers = 45, swa_layers = 33,
      source = "NVIDIA-NeMo/Megatron-Bridge step35_bridge.py; Hugging Face config",
      note = "whether 512 counts the query's own key was not verified: the bridge passes "
        .. "window_left 512; the layer count comes from secondary pages" },
  },
  -- bidirectional: local_attention 128 is both sides together
  { family = "modernbert", pattern = "2:1", q_heads = 12, kv_heads = 12, head_dim = 64,
    window_left = 64, window_right = 64,
    { name = "modernbert-base", layers = 22, swa_layers = 14,
      source = "Hugging Face ModernBertConfig", note = COUNT_NOTE },
  },
}

-- A preset with every field: its own, else its family's, else the plain value.
local function preset(family, row)
  local function field(name, plain)
    if row[name] ~= nil then return row[name] end
    if family[name] ~= nil then return family[name] end
    return plain
  end
  local window = field("window")
  return {
    name = row.name, family = family.family, source = field("source"), note = field("note", ""),
    layers = row.layers, swa_layers = row.swa_layers, pattern = field("pattern"),
    q_heads = field("q_heads"), kv_heads = field("kv_heads"),
    head_dim_qk = field("head_dim_qk") or field("head_dim"),
    head_dim_v = field("head_dim_v") or field("head_dim"),
    window_left = window and window - 1 or field("window_left"),
    window_right = field("window_right", 0),
    dtype = "bf16", sinks = field("sinks", false), softcap = field("softcap", 0),
    scale = field("scale", 0),
  }
end

local models = {}
for _, family in ipairs(families) do
  for _, row in ipairs(family) do models[#models + 1] = preset(family, row) end
end
return models
