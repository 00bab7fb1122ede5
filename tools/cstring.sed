# A text as lines of a C string literal. (In a file of its own: meson turns backslashes of arguments into slashes.)
s/\\/\\\\/g
s/"/\\"/g
s/^/"/
s/$/\\n"/
