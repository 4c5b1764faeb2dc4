"""Make the parts of docs/ that come from the code: the page of settings, the pictures, the site's links."""
