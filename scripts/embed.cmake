# embed.cmake: text files -> one C file that holds them.
#
#   cmake -DOUTPUT=file.c -DTABLE=sw_generator_texts -DROOT=dir -DFILES=generator/emit.lua,... \
#         -P embed.cmake
#
# The C file defines `const struct sw_embedded TABLE[]`, ended by a row of zeros; its type is
# declared by whoever uses it: { const char *name; const char *text; size_t size; }.  Names are
# relative to ROOT.  `const char TABLE_digest[]` is a SHA-256 over all of them.
set(code "// Made by scripts/embed.cmake; change the files it names, not this.\n")
string(APPEND code "#include <stddef.h>\n\n")
string(APPEND code "struct sw_embedded { const char *name; const char *text; size_t size; };\n")
string(APPEND code "extern const struct sw_embedded ${TABLE}[];\n\n")
set(rows "")
set(index 0)
string(REPLACE "," ";" files "${FILES}")
foreach(name IN LISTS files)
  file(READ "${ROOT}/${name}" hex HEX)
  string(LENGTH "${hex}" digits)
  math(EXPR size "${digits} / 2")
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
  string(REPEAT . 80 line)
  string(REGEX REPLACE "(${line})" "\\1\n" bytes "${bytes}")
  string(APPEND code "static const unsigned char text_${index}[] = {\n${bytes}0 };\n")
  string(APPEND rows "  { \"${name}\", (const char *)text_${index}, ${size} },\n")
  math(EXPR index "${index} + 1")
endforeach()
string(SHA256 digest "${code}")
string(APPEND code "\nextern const char ${TABLE}_digest[];\n")
string(APPEND code "const char ${TABLE}_digest[] = \"${digest}\";\n")
string(APPEND code "\nconst struct sw_embedded ${TABLE}[] = {\n${rows}  { NULL, NULL, 0 },\n};\n")
file(WRITE "${OUTPUT}" "${code}")
