-- targets.lua: what swathe can emit for.  Data only.
--
-- A target says how the files of its templates end, and the dtypes its kernels are written for.
--
-- An isa of the cpu says how many floats a vector holds (`lanes`), how many vectors the machine can
-- name (`registers`), whether it multiplies pairs of bfloat16 and adds both products to a float
-- (`bf16_pairs`), what the compiler is told, and the cache sizes of one core that rules and
-- defaults go by.  The compiler is told instructions by name, never "those of this machine": the
-- same source and flags give the same binary wherever it was built.

-- For every CPU image.  -O2, because -O3 only costs time; contraction, because a * b + c is meant
-- to be one FMA.
local common = {
  "-O2", "-std=gnu11", "-fPIC", "-shared", "-ffp-contract=fast", "-fno-math-errno",
  "-fno-trapping-math", "-fno-semantic-interposition",
}

local avx512 = {
  "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-mf16c",
  "-mprefer-vector-width=512",
}

-- A list and one flag more.
local function with(list, flag)
  local longer = table.move(list, 1, #list, 1, {})
  longer[#longer + 1] = flag
  return longer
end

local function gpu(name, shared_kib, hopper)
  return { most_shared_bytes = shared_kib * 1024, most_registers = 65536, hopper = hopper,
           flags = { "--gpu-architecture=" .. name } }
end

return {
  cpu = {
    suffix = ".c",
    dtypes = { "f32", "bf16" },
    flags = common,
    isas = {
      avx512bf16 = {
        lanes = 16, registers = 32, bf16_pairs = 1, l1_bytes = 32 * 1024, l2_bytes = 1024 * 1024,
        flags = with(avx512, "-mavx512bf16"),
      },
      avx512 = {
        lanes = 16, registers = 32, bf16_pairs = 0, l1_bytes = 32 * 1024, l2_bytes = 1024 * 1024,
        flags = avx512,
      },
      avx2 = {
        lanes = 8, registers = 16, bf16_pairs = 0, l1_bytes = 32 * 1024, l2_bytes = 512 * 1024,
        flags = { "-mavx2", "-mfma", "-mf16c" },
      },
      neon = {   -- part of every aarch64, no flag needed
        lanes = 4, registers = 32, bf16_pairs = 0, l1_bytes = 64 * 1024, l2_bytes = 512 * 1024,
        flags = {},
      },
      generic = {   -- whatever the compiler makes of vectors of four
        lanes = 4, registers = 16, bf16_pairs = 0, l1_bytes = 32 * 1024, l2_bytes = 256 * 1024,
        flags = {},
      },
    },
    -- from the best to the plainest, each for the machines that have it
    order = { "avx512bf16", "avx512", "avx2", "neon", "generic" },
  },

  cuda = {
    suffix = ".cu",
    dtypes = { "bf16", "f16" },
    flags = { "--std=c++17" },
    isas = {
      sm_80 = gpu("sm_80", 163, 0),
      sm_86 = gpu("sm_86", 99, 0),
      sm_89 = gpu("sm_89", 99, 0),
      sm_90 = gpu("sm_90", 227, 0),
      sm_90a = gpu("sm_90a", 227, 1),
      sm_100 = gpu("sm_100", 227, 0),
      sm_103 = gpu("sm_103", 227, 0),
      sm_120 = gpu("sm_120", 99, 0),
    },
    order = { "sm_120", "sm_103", "sm_100", "sm_90a", "sm_90", "sm_89", "sm_86", "sm_80" },
  },
}
