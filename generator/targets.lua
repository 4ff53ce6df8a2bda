-- targets.lua: what swathe can emit for.  Data only.
--
-- An isa says how many floats a vector holds (`lanes`), how many vectors the machine can name
-- (`registers`), whether it multiplies pairs of bfloat16 and adds both products to a float
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

return {
  cpu = {
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
}
